"""Which schedule fills the pipeline: time without bubble over the measured step, and the memory it takes.

P = 8 stages over loopback, each sleeping 20 ms in forward, 20 ms in recompute where it is on, and 40 ms in
backward, 20 of them for weight gradients, which ``zero-bubble`` and torch's ZBV put off; 4 KB per activation.
The figure is N · (F + B [+ R]) over the step: higher is better, 1.000 is no stage ever idle. Next to it the
same for messages that take no time, simulated.

Memory is the most sets of activations that a stage held at one time, per stage: a set is there from forward (or
recompute) to the end of backward, weight gradients included. What waits for weight gradients alone is less than
a set.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import replace
from functools import partial

from benchmarks import report, sleeping, varuna_sleeping
from benchmarks.sleeping import Network, Variant
from benchmarks.torch_sleeping import SleepingPipeline
from varuna.testing.emulated import EmulatedRun, run_emulated_pipeline

VARUNA = tuple(Variant(engine="varuna", schedule=name) for name in ("varuna", "1f1b", "zero-bubble"))
TORCH = tuple(Variant(engine="torch", schedule=name) for name in ("1f1b", "zbv"))
TARGETS = {(16, False): "0.86", (32, False): "0.92"}


def run_varuna(schedule: str, pipeline: SleepingPipeline, rounds: int, runs: list[EmulatedRun]) -> float:
    """Median seconds of a step; what else was measured goes to ``runs``."""
    run = run_emulated_pipeline(
        varuna_sleeping.schedules(schedule, pipeline),
        varuna_sleeping.stage_times(pipeline),
        activation_bytes=4 * pipeline.num_values,
        num_steps=rounds + 1,
    )
    runs.append(run)
    return statistics.median(step.makespan_s for step in run.steps[1:])


def measure(pipeline: SleepingPipeline, repeats: int, rounds: int) -> list[list[object]]:
    """Rows of the table for one pipeline: interleaved launches, medians over them."""
    runs: dict[Variant, list[EmulatedRun]] = {variant: [] for variant in VARUNA}
    variants: dict[Variant, Callable[[], float]] = {
        variant: partial(run_varuna, variant.schedule, pipeline, rounds, runs[variant]) for variant in VARUNA
    }
    if not pipeline.recompute:
        for variant in TORCH:
            variants[variant] = partial(sleeping.makespan_s, variant, pipeline, Network(), rounds=rounds)
    figures = report.interleaved(repeats, {str(variant): run for variant, run in variants.items()})
    work_s = pipeline.no_bubble_s
    rows: list[list[object]] = []
    for variant in variants:
        measured = [work_s / seconds for seconds in figures[str(variant)]]
        is_ours = variant.engine == "varuna"
        rows.append(
            [
                pipeline.num_micro_batches,
                "yes" if pipeline.recompute else "no",
                str(variant),
                statistics.median(measured),
                _target(variant, pipeline),
                work_s / varuna_sleeping.ideal_s(variant.schedule, pipeline) if is_ours else "",
                " ".join(f"{value:.3f}" for value in sorted(measured)),
                _peaks([run.peak_held for run in runs[variant]]) if is_ours else "",
                _peaks([run.peak_in_flight for run in runs[variant]]) if is_ours else "",
            ]
        )
    return rows


def _target(variant: Variant, pipeline: SleepingPipeline) -> str:
    if variant.schedule != "zero-bubble":
        return ""
    return TARGETS.get((pipeline.num_micro_batches, pipeline.recompute), "above the others")


def _peaks(peaks: list[tuple[int, ...]]) -> str:
    """The largest of all launches, per stage."""
    return " ".join(str(max(of_stage)) for of_stage in zip(*peaks, strict=True))


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=3, rounds=2, stages=8)
    rows: list[list[object]] = []
    for num_micro_batches in (16, 32):
        pipeline = SleepingPipeline(
            num_stages=options.stages,
            num_micro_batches=num_micro_batches,
            forward_s=0.020,
            backward_s=0.040,
            num_values=1024,
        )
        for recompute in (False, True):
            rows += measure(replace(pipeline, recompute=recompute), options.repeats, options.rounds)
    header = [
        "N",
        "recompute",
        "engine",
        "no-bubble / measured",
        "target",
        "no-bubble / simulated",
        "all launches",
        "sets held per stage",
        "in flight per stage",
    ]
    report.report(f"Schedules, P = {options.stages}, loopback", report.table(header, rows), options.log)


if __name__ == "__main__":
    main()
