"""How fast is a plan chosen, in how much memory, and what do borders by time gain over equal counts?

Speed: a model of 96 sections with 8 micro-batch sizes, all four schedules; 25 machines of 4 devices and 2500
of 4. Each figure is from a process of its own, on one core, after one plan for a small cluster, so after import
and compile. "One less" is the choice after that, when a device has left: what a morph waits for. Memory is the
most that the process had.

Borders: models with unlike sections; ``1f1b``, m = 1. The gain is the predicted step with equal counts of
sections over that with the table's borders; theory is the same of ``(n - 1) max + sum`` over the stages.
"""

from __future__ import annotations

import os
import resource
import statistics
import subprocess
import sys
import time
from dataclasses import replace
from itertools import pairwise

from benchmarks import report
from benchmarks.models import deep_gpt, heavy_ends, pyramid
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster
from varuna.plan.costs import stage_costs
from varuna.plan.predict import predict
from varuna.plan.profile import Profile
from varuna.spec import PipelineSpec, Plan, StageSpec

SPEED = (("25x4", 8192, 0.05), ("2500x4", 65536, 1.0), ("2500x4", 1 << 20, 1.0))
MEMORY_MB = 500


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=5)
    header = ["machines", "batch", "answer s", "one less s", "target", "process MB", "target", "plan"]
    rows = [_speed_row(machines, batch, target, options.repeats) for machines, batch, target in SPEED]
    report.report("Choosing a plan: 96 sections, 8 sizes, 4 schedules", report.table(header, rows), options.log)
    header = ["model", "P", "N", "equal counts s", "by time s", "gain", "theory", "borders"]
    rows = [
        _border_row(profile, stages, 4 * stages)
        for profile in (heavy_ends(), pyramid())
        for stages in (2, 4, 8)
    ]
    report.report("Borders by time against equal counts, predicted", report.table(header, rows), options.log)


def _speed_row(machines: str, batch_size: int, target_s: float, repeats: int) -> list[object]:
    command = [
        sys.executable,
        "-W",
        "ignore",
        "-m",
        "benchmarks.bench_choose",
        "--once",
        machines,
        str(batch_size),
    ]
    lines = [
        subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip().split("\t")
        for _ in range(repeats)
    ]
    seconds = statistics.median(float(line[0]) for line in lines)
    again = statistics.median(float(line[1]) for line in lines)
    megabytes = f"{max(float(line[2]) for line in lines):.0f}"
    return [machines, batch_size, seconds, again, f"<= {target_s}", megabytes, f"<= {MEMORY_MB}", lines[0][3]]


def once(machines: str, batch_size: int) -> None:
    """Choose one plan, and one for a device less; print seconds of both, megabytes and the first plan."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    profile = deep_gpt()
    choose_plan(profile, Cluster.parse("8x4"), batch_size=512)  # imports and compiles
    cluster = Cluster.parse(machines)
    *others, last = cluster.machines
    less = Cluster(machines=(*others, replace(last, num_workers=last.num_workers - 1)))
    start_s = time.perf_counter()
    choice = choose_plan(profile, cluster, batch_size=batch_size)
    seconds = time.perf_counter() - start_s
    start_s = time.perf_counter()
    choose_plan(profile, less, batch_size=batch_size)
    again_s = time.perf_counter() - start_s
    megabytes = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e3
    print(seconds, again_s, megabytes, choice.reason.split(". ")[0], sep="\t")


def _border_row(profile: Profile, num_stages: int, num_micro_batches: int) -> list[object]:
    count = len(profile.sections)
    equal = tuple(count * stage // num_stages for stage in range(num_stages + 1))
    chosen = choose_plan(
        profile, Cluster.parse(f"1x{num_stages}"), batch_size=num_micro_batches, num_stages=num_stages,
        micro_batch_size=1, schedule="1f1b", recompute=False,
    )  # fmt: skip
    stages = chosen.plan.pipelines[0].stages
    borders = (0, *(stage.end_section for stage in stages))
    equal_s = predict(
        plan_with(profile, equal, num_micro_batches), profile, Cluster.parse(f"1x{num_stages}")
    ).step_s
    theory = theory_s(profile, equal, num_micro_batches) / theory_s(profile, borders, num_micro_batches)
    gain = equal_s / chosen.prediction.step_s
    return [
        profile.model,
        num_stages,
        num_micro_batches,
        equal_s,
        chosen.prediction.step_s,
        gain,
        theory,
        borders,
    ]


def plan_with(profile: Profile, borders: tuple[int, ...], num_micro_batches: int) -> Plan:
    """One pipeline with these borders, m = 1, ``1f1b``."""
    stages = tuple(
        StageSpec(worker_index=index, first_section=first, end_section=end)
        for index, (first, end) in enumerate(pairwise(borders))
    )
    pipeline = PipelineSpec(stages=stages, first_micro_batch=0, end_micro_batch=num_micro_batches)
    return Plan(
        pipelines=(pipeline,), num_workers=len(stages), num_sections=len(profile.sections),
        batch_size=num_micro_batches, micro_batch_size=1, schedule="1f1b",
    )  # fmt: skip


def theory_s(profile: Profile, borders: tuple[int, ...], num_micro_batches: int) -> float:
    """Seconds of a step if messages took none: the slowest stage for all but one micro-batch, all for that."""
    costs = [stage_costs(profile, first, end, 1) for first, end in pairwise(borders)]
    seconds = [cost.forward_s + cost.backward_s for cost in costs]
    return (num_micro_batches - 1) * max(seconds) + sum(seconds)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--once"]:
        once(sys.argv[2], int(sys.argv[3]))
    else:
        main()
