"""Two processes on two cores: Varuna's pipeline against ``torch.distributed.pipelining`` on the same stages.

The same GPT halves, micro-batches, AdamW and stages that recompute; both engines live in the same two processes
and run step by step in turn. The figure is Varuna's step time over torch's: lower is better, 1.000 is parity.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from functools import partial

import torch
import torch.distributed as dist

import varuna
from benchmarks import gpt, report, torch_gpt, workers

SCHEDULES = ("1f1b", "gpipe")
RATE, SEED, NUM_SAMPLES, WARM_UP = 1e-4, 0, 4096, 2
TARGET = 1.00
Step = Callable[[int], None]


def varuna_steps(
    name: str, rank: int, port: int, *, recompute: bool, sizes: tuple[int, int], num_steps: int
) -> Step:
    """A function that runs the next step of a Varuna job of two stages."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE="2", LOCAL_WORLD_SIZE="2",
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), TORCHELASTIC_RUN_ID=f"benchmark-{port}",
    )  # fmt: skip
    model = gpt.build()
    job = varuna.Varuna(
        model,
        torch.optim.AdamW(model.parameters(), lr=RATE),
        gpt.Text(NUM_SAMPLES),
        batch_size=sizes[0],
        seed=SEED,
        layout=varuna.Layout(num_stages=2, micro_batch_size=sizes[1], schedule=name, recompute=recompute),
        progress=False,
    )
    steps = job.train(num_steps)

    def step(step_index: int) -> None:
        assert next(steps).index == step_index

    return step


def work(
    rank: int, *, line: workers.StartLine, ports: list[int], sizes: tuple[int, int], repeats: int
) -> dict[str, list[list[float]]]:
    """All variants in turn on one rank; per variant the start and end of every measured step."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{ports[0]}", rank=rank, world_size=2)
    steps: dict[str, Step] = {}
    free_ports = iter(ports[1:])
    for name in SCHEDULES:
        for recompute in (False, True):
            ids_of = partial(_ids, sizes[0])
            steps[_key("torch", name, recompute)] = torch_gpt.steps(
                name, rank, recompute=recompute, ids_of=ids_of, micro_batch_size=sizes[1], rate=RATE
            )
            steps[_key("varuna", name, recompute)] = varuna_steps(
                name, rank, next(free_ports), recompute=recompute, sizes=sizes, num_steps=repeats + WARM_UP
            )
    spans: dict[str, list[list[float]]] = {key: [] for key in steps}
    round_index = 0
    for step_index in range(repeats + WARM_UP):
        keys = list(steps) if step_index % 2 == 0 else list(reversed(steps))
        for key in keys:
            round_index += 1
            start = line.start(rank, round_index)
            steps[key](step_index)
            spans[key].append([start, time.monotonic()])
    dist.destroy_process_group()
    return {key: of_key[WARM_UP:] for key, of_key in spans.items()}


def _key(engine: str, name: str, recompute: bool) -> str:
    return f"{engine} {name}{' + recompute' if recompute else ''}"


def _ids(batch_size: int, step_index: int) -> list[int]:
    return varuna.sample_ids(step_index, NUM_SAMPLES, batch_size, SEED)


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=9, batch_size=16, micro_batch_size=2)
    run = partial(
        work,
        line=workers.StartLine(2),
        ports=[workers.free_port() for _ in range(1 + 2 * len(SCHEDULES))],
        sizes=(options.batch_size, options.micro_batch_size),
        repeats=options.repeats,
    )
    spans = workers.run_workers(2, run, timeout_s=1800.0)
    seconds = {
        key: [
            max(of_rank[key][index][1] for of_rank in spans) - min(of_rank[key][index][0] for of_rank in spans)
            for index in range(options.repeats)
        ]
        for key in spans[0]
    }
    rows: list[list[object]] = []
    for name in SCHEDULES:
        for recompute in (False, True):
            ours, theirs = seconds[_key("varuna", name, recompute)], seconds[_key("torch", name, recompute)]
            rows.append(
                [
                    _key("", name, recompute).strip(),
                    statistics.median(ours),
                    statistics.median(theirs),
                    report.median_ratio(ours, theirs),
                    TARGET,
                ]
            )
    header = ["schedule", "varuna s", "torch s", "ratio", "target"]
    notes = f"Medians of {options.repeats} steps in turn; the ratio is the median over neighbouring steps."
    report.report(
        "Two stages against torch.distributed.pipelining", report.table(header, rows), options.log, notes
    )


if __name__ == "__main__":
    main()
