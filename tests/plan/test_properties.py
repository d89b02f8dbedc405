"""No schedule can stand still or break its bounds, whatever takes how long and arrives when."""

from __future__ import annotations

import random
from dataclasses import dataclass
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.plan.support import check_order, drain
from varuna.plan import SCHEDULES, StageSchedule, TaskKind, pipeline_schedules, stage_schedule
from varuna.plan.simulate import simulate_step

# derandomize: the same examples in every run, so that a red run is a change and not luck
_settings = settings(max_examples=100, deadline=None, derandomize=True)


OPPORTUNISTIC = ("varuna", "zero-bubble")


@dataclass(frozen=True)
class Case:
    num_micro_batches: int
    mask: tuple[bool, ...]
    limits: tuple[int, ...]
    seed: int

    def schedules(self, name: str) -> list[StageSchedule]:
        return [
            stage_schedule(
                name,
                num_stages=len(self.mask),
                stage_index=index,
                num_micro_batches=self.num_micro_batches,
                recompute=self.mask,
                max_in_flight=self.limits[index] if name in OPPORTUNISTIC else 0,
            )
            for index in range(len(self.mask))
        ]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    num_stages = draw(st.integers(1, 16))
    return Case(
        num_micro_batches=draw(st.integers(1, 64)),
        mask=tuple(draw(st.lists(st.booleans(), min_size=num_stages, max_size=num_stages))),
        limits=tuple(draw(st.lists(st.integers(0, 20), min_size=num_stages, max_size=num_stages))),
        seed=draw(st.integers(0, 2**32)),
    )


@pytest.mark.parametrize("name", SCHEDULES)
@given(case=cases())
@_settings
def test_drains_in_any_interleaving(name, case):
    schedules = case.schedules(name)
    done = drain(schedules, random.Random(case.seed))
    for tasks, schedule in zip(done, schedules, strict=True):
        check_order(tasks, schedule)
        if not schedule.opportunistic:
            assert tuple(tasks) == schedule.order


@pytest.mark.parametrize("name", SCHEDULES)
@given(case=cases(), spread=st.sampled_from([0.0, 0.1, 1.0, 30.0]))
@_settings
def test_drains_under_random_times(name, case, spread):
    schedules = case.schedules(name)
    rng = random.Random(case.seed)
    result = simulate_step(
        schedules,
        duration_s=lambda _stage, _task: rng.uniform(0.0, 1.0),
        latency_s=lambda _stage, _task: rng.uniform(0.0, spread),
    )
    for index, schedule in enumerate(schedules):
        check_order([span.task for span in result.timelines[index]], schedule)
        assert result.peak_in_flight[index] <= schedule.max_in_flight
        assert result.peak_recomputed[index] <= (1 if schedule.recompute else 0)
        if schedule.split:
            assert result.peak_held[index] <= schedule.max_held
        spans = result.timelines[index]
        assert all(now.end_s <= later.start_s + 1e-8 for now, later in pairwise(spans))
    _check_causes(result.timelines)


def _check_causes(timelines):
    """No forward starts before the one of the stage before it ended, no backward before the one after it."""
    ends = [{span.task: span.end_s for span in timeline} for timeline in timelines]
    for index, timeline in enumerate(timelines):
        for span in timeline:
            if span.task.kind is TaskKind.FORWARD and index > 0:
                assert ends[index - 1][span.task] <= span.start_s + 1e-8
            elif span.task.kind is TaskKind.BACKWARD and index + 1 < len(timelines):
                assert ends[index + 1][span.task] <= span.start_s + 1e-8


@pytest.mark.parametrize("name", OPPORTUNISTIC)
@given(
    num_stages=st.integers(1, 16),
    num_micro_batches=st.integers(1, 64),
    limit=st.integers(1, 64),
    recompute=st.booleans(),
)
@_settings
def test_no_limit_is_exceeded(name, num_stages, num_micro_batches, limit, recompute):
    schedules = pipeline_schedules(
        name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        recompute=[recompute] * num_stages,
        max_in_flight=limit,
    )
    result = simulate_step(schedules, duration_s=lambda _stage, _task: 1.0, latency_s=0.7)
    assert max(result.peak_in_flight) <= limit
    if name == "zero-bubble":
        assert max(result.peak_held) <= limit
