"""Is the chosen plan the best? Every candidate really runs; the figure is its step over the best one's.

24 situations: 4 or 8 workers, three networks (as in ``bench_simulator``), equal sections or a heavy last one, a
small or a large batch, P given or free. A section of m samples sleeps (1 + m) ms forward and twice that in
backward, so small micro-batches cost more and large ones leave a larger bubble. Candidates are every schedule
with several micro-batch sizes (and numbers of stages, where that is free); those within a tenth of the best,
and the chosen one, then run again in turn. Lower is better. Needs root for two of the networks.
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import partial

from benchmarks import report
from benchmarks.bench_simulator import JITTERED, LOOPBACK, MESSAGE_BYTES, NETWORKS, SLOW, STATED_LINK
from benchmarks.emulated_plans import calibrate, emulated_profile, measure_step_s, plan_of
from varuna.plan import SCHEDULES
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster
from varuna.plan.predict import predict
from varuna.plan.profile import Profile, TaskCosts
from varuna.spec import Plan

NUM_SECTIONS = 8
TARGET = 1.03
SECTION_BYTES = 1 << 30
SIZES = (1, 2, 4)
_CLOSE = 1.10
_MAX_CLOSE = 4


@dataclass(frozen=True, kw_only=True)
class Situation:
    """What is to be planned.

    Attributes:
        network: one of ``NETWORKS``.
        num_workers: on one machine.
        heavy_end: whether the last section takes three times as long as any other.
        batch_size: samples of a global batch.
        num_stages: P where it is given; None leaves it to the chooser, from half the workers on (memory).
    """

    network: str
    num_workers: int
    heavy_end: bool
    batch_size: int
    num_stages: int | None

    def profile(self) -> Profile:
        """Stated sleeps, memory for twice the sections that a worker holds in the longest pipeline."""
        most = 2 * NUM_SECTIONS // self.num_workers
        profile = emulated_profile([self._costs(index) for index in range(NUM_SECTIONS)], STATED_LINK)
        return replace(
            profile,
            sections=tuple(replace(section, parameter_bytes=SECTION_BYTES) for section in profile.sections),
            device_memory_bytes=most * SECTION_BYTES + SECTION_BYTES // 2,
        )

    def _costs(self, index: int) -> list[TaskCosts]:
        factor = 3.0 if self.heavy_end and index == NUM_SECTIONS - 1 else 1.0
        crossing = MESSAGE_BYTES[self.network][0] if index < NUM_SECTIONS - 1 else 0
        return [
            TaskCosts(
                micro_batch_size=size,
                forward_s=1e-3 * (1 + size) * factor,
                recompute_s=1e-3 * (1 + size) * factor,
                backward_s=2e-3 * (1 + size) * factor,
                weight_s=1e-3 * (1 + size) * factor,
                output_bytes=crossing * size,
                gradient_bytes=crossing * size,
            )
            for size in (*SIZES, 8, 16)
        ]

    def candidates(self, profile: Profile) -> dict[str, Plan]:
        """The grid, by a name for people; borders by time or, where those do not fit, by count of sections."""
        depths = [self.num_stages] if self.num_stages else [self.num_workers // 2, self.num_workers]
        found: dict[str, Plan] = {}
        for depth in depths:
            for size in SIZES if self.num_stages else (SIZES[0], SIZES[-1]):
                for schedule in SCHEDULES:
                    make = partial(
                        plan_of, profile, num_workers=self.num_workers, num_stages=depth,
                        batch_size=self.batch_size, micro_batch_size=size, schedule=schedule,
                    )  # fmt: skip
                    fitting = [plan for plan in (make(), make(by_count=True)) if self._fits(plan, profile)]
                    found |= {f"P={depth} m={size} {schedule}": plan for plan in fitting[:1]}
        return found

    def _fits(self, plan: Plan, profile: Profile) -> bool:
        prediction = predict(plan, profile, Cluster.parse(f"1x{self.num_workers}"))
        return all(
            stage.peak_memory_bytes <= profile.device_memory_bytes
            for pipeline in prediction.pipelines
            for stage in pipeline.stages
        )


def situations() -> Iterator[Situation]:
    """All combinations."""
    for network in (LOOPBACK, JITTERED, SLOW):
        for num_workers in (4, 8):
            for heavy_end in (False, True):
                for batch_size, num_stages in ((16, num_workers), (48, None)):
                    yield Situation(
                        network=network, num_workers=num_workers, heavy_end=heavy_end, batch_size=batch_size,
                        num_stages=num_stages,
                    )  # fmt: skip


def chosen_plan(situation: Situation, calibrated: Profile) -> Plan:
    """What the chooser says, from the stated sleeps and the measured link and engine."""
    profile = replace(
        situation.profile(),
        within_machine=calibrated.within_machine,
        across_machines=calibrated.across_machines,
        task_overhead_s=calibrated.task_overhead_s,
    )
    cluster = Cluster.parse(f"1x{situation.num_workers}")
    return choose_plan(profile, cluster, batch_size=situation.batch_size, num_stages=situation.num_stages).plan


def measure(situation: Situation, calibrated: Profile, repeats: int) -> list[object]:
    """One row."""
    network, profile = NETWORKS[situation.network], situation.profile()
    chosen = chosen_plan(situation, calibrated)
    name = f"P={len(chosen.pipelines[0].stages)} m={chosen.micro_batch_size} {chosen.schedule}"
    plans = situation.candidates(profile)
    first_s = {key: measure_step_s(plan, profile, network, rounds=1) for key, plan in plans.items()}
    best_s = min(first_s.values())
    close = sorted((key for key in plans if first_s[key] <= _CLOSE * best_s), key=lambda key: first_s[key])
    again = {key: plans[key] for key in close[:_MAX_CLOSE]} | {"chosen": chosen}
    figures = report.interleaved(
        repeats,
        {key: partial(measure_step_s, plan, profile, network, rounds=2) for key, plan in again.items()},
    )
    seconds = {key: statistics.median(of_plan) for key, of_plan in figures.items()}
    best = min((key for key in again if key != "chosen"), key=lambda key: seconds[key])
    worst_s = max(first_s.values())
    return [
        situation.network, situation.num_workers, "heavy" if situation.heavy_end else "equal",
        situation.batch_size, "given" if situation.num_stages else "free", name, seconds["chosen"], best,
        seconds[best], worst_s, seconds["chosen"] / seconds[best],
    ]  # fmt: skip


def arguments() -> argparse.Namespace:
    """The shared command line and ``--quick``."""
    made = report.parser(__doc__ or "", repeats=3)
    made.add_argument("--only", type=int, nargs="+", help="numbers of situations, from 1 on")
    made.add_argument("--quick", action="store_true", help="4 workers, small batches, once")
    return made.parse_args()


def main() -> None:
    options = arguments()
    wanted = list(situations())
    if os.geteuid() != 0:
        print("Without root: loopback only.", file=sys.stderr)
        wanted = [one for one in wanted if one.network == LOOPBACK]
    if options.quick:
        options.repeats = 1
        wanted = [one for one in wanted if one.num_workers == 4 and one.batch_size == 16]
    if options.only:
        wanted = [wanted[number - 1] for number in options.only]
    names = dict.fromkeys(one.network for one in wanted)
    calibrated = {name: calibrate(wanted[0].profile(), NETWORKS[name]) for name in names}
    rows = []
    for number, one in enumerate(wanted, start=1):
        rows.append(measure(one, calibrated[one.network], options.repeats))
        print(f"{number} of {len(wanted)}:", *rows[-1], file=sys.stderr, flush=True)
    ratios = [float(str(row[-1])) for row in rows]
    within = sum(ratio <= TARGET for ratio in ratios)
    notes = (
        f"{within} of {len(ratios)} choices are within {TARGET - 1:.0%} of the best measured candidate; ratio "
        f"median {statistics.median(ratios):.3f}, largest {max(ratios):.3f}. Below 1: better than all of them."
    )
    header = [
        "network", "workers", "sections", "batch", "P", "chosen", "chosen s", "best candidate", "best s",
        "worst s", "chosen / best",
    ]  # fmt: skip
    report.report("Chosen plan against every candidate", report.table(header, rows), options.log, notes)


if __name__ == "__main__":
    main()
