"""One worker: Varuna's step time over the plain loop's, on the same GPT and micro-batch, step by step in turn.

Both sides run AdamW with clipping at the same micro-batch size; lower is better, 1.000 is no cost at all.
"""

from __future__ import annotations

import itertools
import os
import statistics
import time
from collections.abc import Callable

import torch

import varuna
from benchmarks import gpt, report

LEARNING_RATE, CLIP_GRAD_NORM, SEED, NUM_SAMPLES = 1e-4, 1.0, 0, 4096
TARGET = 1.03


def plain_steps(batch_size: int, micro_batch_size: int) -> Callable[[], float]:
    """A function that runs one step of an ordinary loop and returns its loss."""
    model, dataset = gpt.build(), gpt.Text(NUM_SAMPLES)
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE)
    step_indices = itertools.count()

    def step() -> float:
        ids = varuna.sample_ids(next(step_indices), NUM_SAMPLES, batch_size, SEED)
        total = 0.0
        for start in range(0, batch_size, micro_batch_size):
            part = ids[start : start + micro_batch_size]
            batch = torch.utils.data.default_collate([dataset[index] for index in part])
            loss = model(**batch) * (len(part) / batch_size)
            loss.backward()
            total += loss.item()
        torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def varuna_steps(batch_size: int, micro_batch_size: int, num_steps: int) -> Callable[[], float]:
    """A function that runs one step of the same training with Varuna."""
    model = gpt.build()
    job = varuna.Varuna(
        model,
        torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE),
        gpt.Text(NUM_SAMPLES),
        batch_size=batch_size,
        clip_grad_norm=CLIP_GRAD_NORM,
        seed=SEED,
        layout=varuna.Layout(num_stages=1, micro_batch_size=micro_batch_size, recompute=False),
        progress=False,
    )
    steps = job.train(num_steps)
    return lambda: next(steps).loss


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=15, batch_size=16, micro_batch_size=4, threads=1)
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK"):
        os.environ.pop(name, None)
    torch.set_num_threads(options.threads)
    warm_up = 3
    size = (options.batch_size, options.micro_batch_size)
    steps = {"plain": plain_steps(*size), "varuna": varuna_steps(*size, options.repeats + warm_up)}
    losses: dict[str, list[float]] = {name: [] for name in steps}

    def timed(name: str) -> float:
        start = time.perf_counter()
        losses[name].append(steps[name]())
        return time.perf_counter() - start

    runs = {name: lambda name=name: timed(name) for name in steps}
    report.interleaved(warm_up, runs)
    seconds = report.interleaved(options.repeats, runs)
    ratio = report.median_ratio(seconds["varuna"], seconds["plain"])
    apart = max(abs(a - b) for a, b in zip(losses["plain"], losses["varuna"], strict=True))
    rows = [
        ["plain loop", statistics.median(seconds["plain"]), 1.0, ""],
        ["varuna", statistics.median(seconds["varuna"]), ratio, TARGET],
    ]
    text = report.table(["engine", "step s", "ratio", "target"], rows)
    notes = (
        f"Medians of {options.repeats} steps in turn; the ratio is the median over neighbouring steps. Largest "
        f"difference of the losses: {apart:.1e}."
    )
    report.report("One worker against the plain loop", text, options.log, notes)


if __name__ == "__main__":
    main()
