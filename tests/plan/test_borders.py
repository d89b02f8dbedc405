"""Borders by table against borders by trying all, with memory counted by ``memory.stage_memory_bytes``."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations, pairwise
from math import inf

import numpy as np
import pytest

from tests.plan.profiles import FREE, make_costs, make_profile, make_section
from tests.plan.random_profiles import random_profile
from varuna.plan import SCHEDULES, stage_schedule
from varuna.plan.borders import BorderProblem, BorderTable, Rows
from varuna.plan.costs import message_s, stage_costs
from varuna.plan.memory import stage_memory_bytes
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.tables import Residents, SectionTable


@dataclass(frozen=True, kw_only=True)
class Case:
    """A problem for a table, from a profile."""

    profile: Profile
    size: int
    num_micro_batches: int
    schedule: str
    crosses: tuple[bool, ...]
    speed: float = 1.0
    recompute: bool | None = None
    frugal: bool = False
    late_s: float = 0.0

    def problem(self) -> BorderProblem:
        profile, depth = self.profile, len(self.crosses)
        count = len(profile.sections)
        return BorderProblem(
            runs=SectionTable(profile).runs(self.size),
            resident_bytes=Residents(profile).alone_bytes,
            late_s=np.full((count + 1, count + 1), self.late_s),
            num_micro_batches=self.num_micro_batches,
            schedule=self.schedule,
            rows=Rows(
                memory_bytes=np.full(depth, float(profile.device_memory_bytes)),
                speed=np.full(depth, self.speed),
                crosses=np.array(self.crosses),
                recompute=self.recompute,
                within=profile.within_machine,
                across=profile.across_machines,
            ),
            task_overhead_s=profile.task_overhead_s,
            frugal=self.frugal,
        )

    def link(self, row: int) -> LinkProfile:
        return self.profile.across_machines if self.crosses[row - 1] else self.profile.within_machine


class ByTrying:
    """The same by the definitions in the docstring of ``borders``, slowly."""

    def __init__(self, case: Case, depth: int, tail_weight: float) -> None:
        self.case, self.depth, self.tail_weight = case, depth, tail_weight
        self.split = case.schedule == "zero-bubble"
        self.count = len(case.profile.sections)

    def best(self) -> float:
        cuts = combinations(range(1, self.count), self.depth - 1)
        return min((self.value((0, *inner, self.count)) for inner in cuts), default=inf)

    def value(self, borders: tuple[int, ...]) -> float:
        """The most over stages of what is before, ``n b``, and what is after."""
        case, worst, before_s = self.case, 0.0, 0.0
        for stage, (a, b) in enumerate(pairwise(borders)):
            row = self.depth - stage
            after_s = self.seconds(b, self.count) + sum(2 * case.link(r).latency_s for r in range(2, row + 1))
            late_s = max(0.0, case.late_s - self.back_s(0, a))
            worst = max(
                worst,
                before_s
                + case.num_micro_batches * self.busy_s(a, b, row)
                + self.tail_weight * after_s
                + late_s,
            )
            if row > 1:
                costs = stage_costs(case.profile, a, b, case.size)
                forward_s = message_s(case.link(row), costs.output_bytes)
                back_s = message_s(case.link(row), costs.gradient_bytes)
                if self.split and not self.tail_weight:
                    before_s += costs.forward_s / case.speed + (forward_s + back_s) / 2
                else:
                    before_s += self.seconds(a, b) + forward_s + back_s
                before_s += 2 * case.profile.task_overhead_s
        return worst

    def seconds(self, a: int, b: int) -> float:
        """Forward and backward of sections, without what a split backward puts off."""
        if a == b:
            return 0.0
        costs = stage_costs(self.case.profile, a, b, self.case.size)
        late_s = costs.weight_s if self.split else 0.0
        return (costs.forward_s + costs.backward_s - late_s) / self.case.speed

    def back_s(self, a: int, b: int) -> float:
        """What earlier stages still have to do after the last backward of a later one."""
        forward_s = stage_costs(self.case.profile, a, b, self.case.size).forward_s if a < b else 0.0
        return self.seconds(a, b) - forward_s / self.case.speed

    def busy_s(self, a: int, b: int, row: int) -> float:
        case = self.case
        costs, overhead_s = stage_costs(case.profile, a, b, case.size), case.profile.task_overhead_s
        trip_s = self.seconds(a, self.count) + 2 * row * overhead_s
        trip_s += sum(2 * case.link(r).latency_s for r in range(2, row + 1))
        sends_s = case.link(row).send_s if row > 1 else 0.0
        sends_s += case.link(min(row + 1, len(case.crosses))).send_s if a > 0 else 0.0
        wire_s = max(costs.output_bytes, costs.gradient_bytes) / case.link(row).bytes_per_s if row > 1 else 0.0
        work_s = (costs.forward_s + costs.backward_s) / case.speed + (3 if self.split else 2) * overhead_s
        best = inf
        for drops, limit in self.modes(a, b, row):
            again_s = costs.recompute_s / case.speed + overhead_s if drops else 0.0
            best = min(best, max(work_s + sends_s + again_s, wire_s, trip_s / limit))
        return best

    def modes(self, a: int, b: int, row: int) -> Iterator[tuple[bool, int]]:
        """Whether to recompute, and the most in flight that fit."""
        case = self.case
        for drops in (False, True):
            schedule = stage_schedule(
                case.schedule,
                num_stages=len(case.crosses),
                stage_index=len(case.crosses) - row,
                num_micro_batches=case.num_micro_batches,
                recompute=(drops,) * len(case.crosses),
            )
            must_keep = row == 1 and case.schedule != "gpipe" and not drops
            if (schedule.recompute != drops or case.recompute is (not drops)) and not must_keep:
                continue
            limit = schedule.max_in_flight
            least = limit if not schedule.opportunistic else 1 if case.frugal else min(row, limit)
            if self.fits(a, b, drops, limit, schedule.max_held):
                yield drops, limit
                continue
            most = limit - 1 if drops or not self.split else schedule.max_held - 1
            for lower in range(most, least - 1, -1):  # a limit that is stated bounds both
                flying = 1 if row == 1 and schedule.opportunistic else lower
                if self.fits(a, b, drops, flying, min(schedule.max_held, lower)):
                    yield drops, lower
                    break

    def fits(self, a: int, b: int, drops: bool, limit: int, held: int) -> bool:
        """Whatever of the allowed in flight and held there is at one time."""
        flying = range(limit + 1) if not self.split or drops else range(min(limit, held) + 1)
        most = max(
            self.bytes_of(a, b, drops, x, y)
            for x in flying
            for y in ((0,) if not self.split else {0, max(0, held - 1) if drops else held - x})
        )
        return most <= self.case.profile.device_memory_bytes

    def bytes_of(self, a: int, b: int, drops: bool, flying: int, held: int) -> int:
        costs = stage_costs(self.case.profile, a, b, self.case.size)
        extra = max(0, costs.weight_bytes - costs.activation_bytes) if self.split and drops else 0
        return extra + stage_memory_bytes(
            self.case.profile, a, b, self.case.size, recompute=drops, peak_in_flight=flying, peak_held=held
        )


def cases(seed: int, schedule: str) -> Iterator[Case]:
    rng = random.Random(f"{seed} {schedule}")
    for _ in range(12):
        count = rng.randint(1, 6)
        profile = random_profile(rng, count)
        most = stage_memory_bytes(profile, 0, count, 2, recompute=False, peak_in_flight=8, peak_held=4)
        profile = replace(profile, device_memory_bytes=int(most * rng.choice([0.15, 0.3, 0.5, 1.0, 9.0])))
        yield Case(
            profile=profile,
            size=rng.choice([1, 2, 3]),
            num_micro_batches=rng.choice([1, 2, 5, 20]),
            schedule=schedule,
            crosses=tuple(rng.random() < 0.5 for _ in range(rng.randint(1, count))),
            speed=rng.choice([1.0, 0.5]),
            recompute=rng.choice([None, None, None, True, False]),
            frugal=rng.random() < 0.4,
            late_s=rng.choice([0.0, 8.0]),
        )


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("tail_weight", [0.0, 1.0])
def test_borders_are_the_best_of_all(schedule, seed, tail_weight):
    for case in cases(seed, schedule):
        depth = len(case.crosses)
        table = BorderTable(case.problem(), tail_weight=tail_weight)
        trying = ByTrying(case, depth, tail_weight)
        assert table.value_s(depth) == pytest.approx(trying.best()), case
        found = table.borders(depth)
        if found is None:
            assert trying.best() == inf
            continue
        assert trying.value(found.borders) == pytest.approx(trying.best())
        alone = BorderTable(case.problem(), tail_weight=tail_weight, one_depth=True)
        assert alone.value_s(depth) == pytest.approx(table.value_s(depth))


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("seed", range(6))
def test_every_stage_goes_the_fastest_way_that_fits(schedule, seed):
    for case in cases(seed, schedule):
        table = BorderTable(case.problem())
        trying = ByTrying(case, len(case.crosses), 1.0)
        count = len(case.profile.sections)
        for a, b in combinations(range(count + 1), 2):
            for row in range(1, len(case.crosses) + 1):
                assert table.stage(row, a, b)[0] == pytest.approx(trying.busy_s(a, b, row)), (case, a, b, row)


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
def test_one_table_has_the_borders_of_every_depth(schedule):
    for case in cases(7, schedule):
        table = BorderTable(case.problem())
        for depth in range(1, len(case.crosses) + 1):
            shorter = replace(case, crosses=case.crosses[:depth])
            assert table.value_s(depth) == pytest.approx(BorderTable(shorter.problem()).value_s(depth))
            assert table.values_s()[depth] == table.value_s(depth)


def equal_case(num_sections: int = 8, memory_bytes: int = 10**9, **changes) -> Case:
    profile = make_profile(num_sections, device_memory_bytes=memory_bytes)
    values = {"size": 1, "num_micro_batches": 32, "schedule": "varuna", "crosses": (False,) * 4}
    return Case(profile=profile, **(values | changes))


def test_equal_sections_give_equal_stages():
    found = BorderTable(equal_case().problem()).borders(4)
    assert found.borders == (0, 2, 4, 6, 8)
    assert found.recompute == (False,) * 4
    assert found.max_in_flight == (0,) * 4
    assert found.value_s == pytest.approx((32 + 3) * 6.0)


def test_a_heavy_end_gets_a_stage_of_its_own():
    costs = [make_costs(1)] * 7 + [make_costs(1, forward_s=4.0, recompute_s=4.0, backward_s=8.0)]
    sections = tuple(make_section(index, [cost]) for index, cost in enumerate(costs))
    case = equal_case()
    case = replace(case, profile=replace(case.profile, sections=sections))
    assert BorderTable(case.problem()).borders(3 + 1).borders[-2:] == (7, 8)


def test_only_stages_that_do_not_fit_recompute():
    fits = [
        stage_memory_bytes(make_profile(8), 2 * stage, 2 * stage + 2, 1, recompute=False, peak_in_flight=limit)
        for stage, limit in enumerate((4, 3, 2, 1))
    ]
    assert fits == sorted(fits, reverse=True)
    for num_short in range(4):
        limit = max(fits) + 1 if num_short == 0 else fits[num_short - 1] - 1
        found = BorderTable(equal_case(memory_bytes=limit, schedule="1f1b").problem()).borders(4)
        if found.borders == (0, 2, 4, 6, 8):
            assert found.recompute == (True,) * num_short + (False,) * (4 - num_short)


def test_fewer_in_flight_are_tried_before_recompute():
    """Stage 0 has by default 10 in flight; 4 keep all stages at work where messages take no time."""
    profile = make_profile(8)
    limit = stage_memory_bytes(profile, 0, 2, 1, recompute=False, peak_in_flight=6)
    found = BorderTable(equal_case(memory_bytes=limit).problem()).borders(4)
    assert found.recompute == (False,) * 4
    assert found.max_in_flight == (6, 5, 4, 0)


def test_limits_that_memory_lowers_go_down_along_the_pipeline():
    """Later stages would otherwise fill up with micro-batches whose places a limited one waits for."""
    profile = make_profile(8)
    limit = stage_memory_bytes(profile, 0, 2, 1, recompute=False, peak_in_flight=4)
    found = BorderTable(equal_case(memory_bytes=limit).problem()).borders(4)
    assert found.max_in_flight == (4, 3, 2, 0)


def test_frugal_goes_below_what_keeps_later_stages_at_work():
    profile = make_profile(8)
    section_bytes = stage_memory_bytes(profile, 0, 2, 1, recompute=False, peak_in_flight=2)
    case = equal_case(memory_bytes=section_bytes, recompute=False)
    assert BorderTable(case.problem()).borders(4) is None
    found = BorderTable(replace(case, frugal=True).problem()).borders(4)
    assert found.max_in_flight[0] == 2
    assert found.busy_s[0] == pytest.approx(4 * 6.0 / 2)


def test_given_borders_and_least_bytes():
    case = equal_case()
    table = BorderTable(case.problem())
    assert table.at((0, 2, 4, 6, 8)) == table.borders(4)
    assert table.at((0, 5, 6, 7, 8)).busy_s == pytest.approx((15.0, 3.0, 3.0, 3.0))
    needed = table.least_bytes(4, 0, 5)
    tight = BorderTable(replace(case, profile=replace(case.profile, device_memory_bytes=int(needed))).problem())
    less = BorderTable(
        replace(case, profile=replace(case.profile, device_memory_bytes=int(needed) - 1)).problem()
    )
    frugal = [replace(t.problem, frugal=True) for t in (tight, less)]
    assert BorderTable(frugal[0]).stage(4, 0, 5)[0] < inf
    assert BorderTable(frugal[1]).stage(4, 0, 5)[0] == inf


def test_a_slow_link_makes_the_cut_where_little_crosses():
    """A pyramid: what crosses halves with each section, so the cut moves towards the end."""
    sections = tuple(
        make_section(
            index, [make_costs(1, output_bytes=10 * 2 ** (6 - index), gradient_bytes=10 * 2 ** (6 - index))]
        )
        for index in range(6)
    )
    slow = LinkProfile(latency_s=0.0, bytes_per_s=10.0)
    profile = make_profile(6, sections=sections, within_machine=slow, across_machines=slow)
    case = Case(profile=profile, size=1, num_micro_batches=64, schedule="varuna", crosses=(False,) * 2)
    assert BorderTable(case.problem()).borders(2).borders == (0, 4, 6)
    free = replace(case, profile=replace(profile, within_machine=FREE))
    assert BorderTable(free.problem()).borders(2).borders == (0, 3, 6)
