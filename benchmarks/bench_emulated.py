"""Engine cost with emulated compute: measured step over the schedule's ideal, next to torch's schedules.

Every stage sleeps 20 ms in forward and 40 ms in backward (20 ms in recompute where it is on); P = 4, 8, 16,
N = 2P; 4 KB or 1 MB per activation, over loopback. The ideal is the same schedule with messages that take no
time: lower is better, 1.000 is perfect.
"""

from __future__ import annotations

import statistics
from dataclasses import replace
from functools import partial

from benchmarks import report, sleeping, varuna_sleeping
from benchmarks.sleeping import Network, Variant
from benchmarks.torch_sleeping import SleepingPipeline

ENGINES = (("varuna", ("varuna", "1f1b", "gpipe")), ("torch", ("1f1b", "gpipe")))
TARGETS = {(4, 1024): 1.03, (8, 1024): 1.04, (16, 1024): 1.05}
LARGE_TARGET = 1.08


def measure(pipeline: SleepingPipeline, repeats: int, rounds: int) -> list[list[object]]:
    """Rows of the table for one size."""
    runs = {
        (Variant(engine=engine, schedule=schedule), recompute): replace(pipeline, recompute=recompute)
        for engine, names in ENGINES
        for schedule in names
        for recompute in ((False, True) if engine == "varuna" else (False,))
    }
    names = {
        f"{variant}{' + recompute' if recompute else ''}": key for key in runs for variant, recompute in [key]
    }
    figures = report.interleaved(
        repeats,
        {
            name: partial(sleeping.makespan_s, key[0], runs[key], Network(), rounds=rounds)
            for name, key in names.items()
        },
    )
    rows: list[list[object]] = []
    for name, key in names.items():
        ideal_s = varuna_sleeping.ideal_s(key[0].schedule, runs[key])
        measured_s = statistics.median(figures[name])
        is_ours = key[0].engine == "varuna"
        target = TARGETS.get((pipeline.num_stages, pipeline.num_values), LARGE_TARGET) if is_ours else ""
        rows.append(
            [
                pipeline.num_stages,
                f"{4 * pipeline.num_values >> 10} KB",
                name,
                ideal_s,
                measured_s,
                measured_s / ideal_s,
                target,
            ]
        )
    return rows


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=3, rounds=2, max_stages=16)
    rows: list[list[object]] = []
    for num_stages in (4, 8, 16):
        for num_values in (1 << 10, 1 << 18):
            if num_stages <= options.max_stages:
                pipeline = SleepingPipeline(
                    num_stages=num_stages,
                    num_micro_batches=2 * num_stages,
                    forward_s=0.020,
                    backward_s=0.040,
                    num_values=num_values,
                )
                rows += measure(pipeline, options.repeats, options.rounds)
    header = ["P", "activation", "engine", "ideal s", "measured s", "measured / ideal", "target"]
    report.report("Emulated compute, N = 2P, loopback", report.table(header, rows), options.log)


if __name__ == "__main__":
    main()
