"""Pipelines on a network with 5 ± 5 ms per message one way: Varuna's schedule against torch's, side by side.

Every stage sleeps 20 ms in forward and 40 ms in backward and sends 4 KB; no recompute; N = 32. The figure is
the time without bubble (N · 60 ms, times 1.5 where one stage is slow) over the measured step: higher is better.
Needs root.
"""

from __future__ import annotations

import os
import statistics
import sys
from dataclasses import replace
from functools import partial

from benchmarks import report, sleeping, torch_sleeping, varuna_sleeping
from benchmarks.sleeping import Network, Variant
from benchmarks.torch_sleeping import SleepingPipeline

VARIANTS = (
    Variant(engine="varuna", schedule="varuna"),
    Variant(engine="torch", schedule="1f1b"),
    Variant(engine="torch", schedule="gpipe"),
    Variant(engine="torch", schedule="zbv"),
)
NETWORK = Network(low_s=0.0, high_s=0.010)
TARGETS = {(4, False): 0.88, (8, False): 0.77, (4, True): 0.93, (8, True): 0.84}


def in_flight(variant: Variant, pipeline: SleepingPipeline) -> list[int]:
    """Most micro-batches between forward and backward, per stage."""
    engine = torch_sleeping if variant.engine == "torch" else varuna_sleeping
    return engine.in_flight(variant.schedule, pipeline)


def measure(pipeline: SleepingPipeline, repeats: int, rounds: int) -> list[list[object]]:
    """Rows of the table for one pipeline: interleaved launches, medians over them."""
    runs = {str(v): partial(sleeping.makespan_s, v, pipeline, NETWORK, rounds=rounds) for v in VARIANTS}
    figures = report.interleaved(repeats, runs)
    slow = pipeline.slow_stage >= 0
    rows: list[list[object]] = []
    for variant in VARIANTS:
        seconds = figures[str(variant)]
        target = TARGETS[pipeline.num_stages, slow] if variant.engine == "varuna" else ""
        rows.append(
            [
                pipeline.num_stages,
                "one 1.5x slower" if slow else "equal",
                str(variant),
                pipeline.no_bubble_s / statistics.median(seconds),
                target,
                " ".join(f"{pipeline.no_bubble_s / value:.3f}" for value in sorted(seconds)),
                " ".join(map(str, in_flight(variant, pipeline))),
            ]
        )
    return rows


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=3, rounds=2, micro_batches=32)
    if os.geteuid() != 0:
        sys.exit("bench_jitter makes network namespaces and TUN devices: run it as root.")
    rows: list[list[object]] = []
    for num_stages in (4, 8):
        equal = SleepingPipeline(
            num_stages=num_stages,
            num_micro_batches=options.micro_batches,
            forward_s=0.020,
            backward_s=0.040,
            num_values=1024,
        )
        slow = replace(equal, slow_stage=num_stages // 2, slow_factor=1.5)
        for pipeline in (equal, slow):
            rows += measure(pipeline, options.repeats, options.rounds)
    header = ["P", "stages", "engine", "no-bubble / measured", "target", "all launches", "in flight per stage"]
    report.report("Jittered network, 5 ± 5 ms one way", report.table(header, rows), options.log)


if __name__ == "__main__":
    main()
