"""Slow workers: found against their peers or the prediction, given less, left out, and taken back."""

from __future__ import annotations

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.morph.steering import check_done, members, run, started, told
from tests.morph.world_parts import plan_of
from varuna.morph.phases import Phase
from varuna.morph.slowness import REST_S, WINDOW, paces, relative_step_s, rest_s, share_out
from varuna.spec import Plan


def busy(*seconds: float) -> dict[int, list[float]]:
    return {rank: [each] * WINDOW for rank, each in enumerate(seconds)}


def shares(plan: Plan) -> list[int]:
    return [pipeline.num_micro_batches for pipeline in plan.pipelines]


def test_slow_against_the_same_stage_of_other_pipelines() -> None:
    """Two pipelines of two stages; the second stage computes twice as long in both, which is no slowness."""
    plan = plan_of(4, 2)
    found = paces(plan, busy(1.0, 2.0, 1.6, 2.0))
    assert [(pace.rank, pace.speed, pace.is_chronic) for pace in found] == [
        (0, 1.0, False),
        (1, 1.0, False),
        (2, pytest.approx(1 / 1.6), True),
        (3, 1.0, False),
    ]


def test_uneven_shares_are_no_slowness() -> None:
    plan = share_out(plan_of(2, 1), {1: 0.6})
    assert shares(plan) == [5, 3]
    assert [pace.speed for pace in paces(plan, busy(5.0, 3.0))] == [1.0, 1.0]


def test_a_few_slow_steps_are_not_chronic() -> None:
    steps = busy(3.0, 3.0, 2.0)  # their shares are 3, 3 and 2 of 8 micro-batches
    steps[1][2] = steps[1][5] = 30.0
    assert [(pace.speed, pace.is_chronic) for pace in paces(plan_of(3, 1), steps)] == [(1.0, False)] * 3


def test_too_few_steps_say_nothing() -> None:
    steps = busy(1.0, 5.0)
    del steps[1][0]
    assert paces(plan_of(2, 1), steps) == ()


def test_against_the_prediction_where_there_are_no_peers() -> None:
    """One pipeline of three; everything takes 1.5 times what was predicted, and stage 1 twice that."""
    plan = plan_of(3, 3)
    predicted = {0: 1 / 8, 1: 1 / 8, 2: 2 / 8}
    found = paces(plan, busy(1.5, 3.0, 3.0), predicted)
    assert [round(pace.speed, 3) for pace in found] == [1.0, 0.5, 1.0]
    assert paces(plan, busy(1.5, 3.0, 3.0)) == ()


def test_rests_get_longer() -> None:
    assert [rest_s(count) for count in range(3)] == [REST_S, 2 * REST_S, 4 * REST_S]


@given(speeds=st.lists(st.sampled_from([0.3, 0.5, 0.7, 0.9, 1.0]), min_size=1, max_size=4))
def test_the_best_shares(speeds: list[float]) -> None:
    plan = plan_of(len(speeds), 1)
    by_rank = dict(enumerate(speeds))
    found = share_out(plan, by_rank)
    assert sum(shares(found)) == plan.num_micro_batches
    possible = [
        each
        for each in itertools.product(range(1, plan.num_micro_batches + 1), repeat=len(speeds))
        if sum(each) == plan.num_micro_batches
    ]
    best = min(max(count / speed for count, speed in zip(each, speeds, strict=True)) for each in possible)
    assert relative_step_s(found, by_rank) == pytest.approx(best)
    if len(set(speeds)) == 1:
        assert found == plan


def test_a_slow_worker_gets_fewer_micro_batches_and_more_again() -> None:
    world = started(2, stages=(1,), num_steps=64)
    slow = world.workers["w1"]
    slow.slowness = 1 / 0.6
    run(world, lambda: world.manager.job.generation.number == 1)
    assert told(world, "slow") == ["w1 is slow: 0.833 s for a micro-batch, its peers 0.5 s"]
    assert world.manager.job.workers["w1"].speed == 0.6
    plan = world.manager.job.generation.plan
    assert plan is not None
    assert shares(plan) == [5, 3]
    assert members(world) == ["w0", "w1"]
    slow.slowness = 1.0
    run(world, lambda: world.manager.job.generation.number == 2)
    plan = world.manager.job.generation.plan
    assert plan is not None
    assert shares(plan) == [4, 4]
    assert "as fast as its peers again" in told(world, "slow")[1]
    check_done(world)
    assert world.manager.job.generation.number == 2, "it came to rest"


def test_a_very_slow_worker_is_left_out_and_gets_another_try() -> None:
    world = started(3, stages=(1,), num_steps=120)
    slow = world.workers["w1"]
    slow.slowness = 4.0
    run(world, lambda: world.manager.job.generation.number == 1)
    plan = world.manager.job.generation.plan
    assert plan is not None
    assert members(world) == ["w0", "w1", "w2"]
    assert plan.stage_of(1) is None
    assert shares(plan) == [4, 4]
    run(world, lambda: world.manager.job.phase is Phase.RUNNING)
    world.advance(REST_S - 1.0)
    assert world.manager.job.phase is Phase.RUNNING
    slow.slowness = 1.0
    world.advance(2.0)
    assert world.manager.job.phase is Phase.PAUSING
    run(world, lambda: world.manager.job.generation.number == 2)
    plan = world.manager.job.generation.plan
    assert plan is not None
    assert plan.stage_of(1) is not None
    check_done(world)
    assert world.manager.job.generation.number == 2


def test_a_slow_worker_that_is_needed_works_on() -> None:
    world = started(2, stages=(1,), least=2, num_steps=40)
    world.workers["w1"].slowness = 4.0
    run(world, lambda: world.manager.job.generation.number == 1)
    plan = world.manager.job.generation.plan
    assert plan is not None
    assert shares(plan) == [7, 1]
    check_done(world)


def test_a_plan_keeps_its_pipelines_when_shares_change() -> None:
    plan = plan_of(4, 2)
    found = share_out(plan, {3: 0.5})
    assert [pipeline.stages for pipeline in found.pipelines] == [pipeline.stages for pipeline in plan.pipelines]
    assert replace(found, pipelines=plan.pipelines) == plan
