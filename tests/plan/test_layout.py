from __future__ import annotations

import random
from itertools import combinations, pairwise
from math import inf

import pytest

from tests.plan.support import make_sections
from varuna.errors import PlanError
from varuna.plan import simple_plan
from varuna.plan.balance import balance


def plan_of(flops=(1.0,) * 8, *, parameter_bytes=100, **arguments):
    arguments = {"num_workers": 4, "batch_size": 64} | arguments
    return simple_plan(sections=make_sections(flops, parameter_bytes=parameter_bytes), **arguments)


def best_by_trying(costs, num_stages, sizes, limit):
    """Least maximal cost over all ways to cut, or inf."""
    best = inf
    for inner in combinations(range(1, len(costs)), num_stages - 1):
        borders = (0, *inner, len(costs))
        runs = list(pairwise(borders))
        if all(sum(sizes[a:b]) <= limit for a, b in runs):
            best = min(best, max(sum(costs[a:b]) for a, b in runs))
    return best


def test_balance_is_the_best_of_all_ways():
    rng = random.Random(0)
    for _ in range(300):
        count = rng.randint(1, 9)
        costs = [float(rng.randint(0, 9)) for _ in range(count)]
        sizes = [float(rng.randint(1, 5)) for _ in range(count)]
        num_stages, limit = rng.randint(1, count), rng.choice([inf, 5.0, 8.0, 12.0])
        borders = balance(costs, num_stages, sizes=sizes, size_limit=limit)
        best = best_by_trying(costs, num_stages, sizes, limit)
        if borders is None:
            assert best == inf
            continue
        runs = list(pairwise(borders))
        assert len(runs) == num_stages
        assert (borders[0], borders[-1]) == (0, count)
        assert all(a < b for a, b in runs)
        assert max(sum(costs[a:b]) for a, b in runs) == best
        assert all(sum(sizes[a:b]) <= limit for a, b in runs)


def test_workers_lie_pipeline_by_pipeline_and_the_rest_are_spares():
    plan = plan_of(num_workers=7, num_stages=3).plan
    workers = [[stage.worker_index for stage in pipeline.stages] for pipeline in plan.pipelines]
    assert workers == [[0, 1, 2], [3, 4, 5]]
    assert plan.position_of(6) is None


def test_shares_are_contiguous_and_even():
    plan = plan_of(num_workers=3, batch_size=8, num_stages=1, micro_batch_size=1).plan
    assert [(p.first_micro_batch, p.end_micro_batch) for p in plan.pipelines] == [(0, 3), (3, 6), (6, 8)]


def test_stages_are_balanced_by_flops_or_else_by_bytes():
    stages = plan_of([1.0, 1.0, 1.0, 5.0, 1.0], num_stages=3).plan.pipelines[0].stages
    assert [(s.first_section, s.end_section) for s in stages] == [(0, 3), (3, 4), (4, 5)]
    stages = plan_of([0.0] * 6, num_stages=3).plan.pipelines[0].stages
    assert [(s.first_section, s.end_section) for s in stages] == [(0, 2), (2, 4), (4, 6)]
    stages = plan_of([0.0] * 4, parameter_bytes=0, num_stages=2).plan.pipelines[0].stages
    assert [(s.first_section, s.end_section) for s in stages] == [(0, 2), (2, 4)]


@pytest.mark.parametrize(
    ("memory_bytes", "num_stages"),
    [(None, 1), (4 * 800, 1), (4 * 800 - 1, 2), (4 * 400, 2), (4 * 300, 3), (4 * 200, 4), (1, 4)],
)
def test_fewest_stages_that_fit_memory(memory_bytes, num_stages):
    choice = plan_of(memory_bytes=memory_bytes)
    assert len(choice.plan.pipelines[0].stages) == num_stages
    assert ("may not fit" in choice.reason) is (memory_bytes == 1)


def test_memory_moves_borders():
    sections = make_sections([9.0, 1.0, 1.0, 1.0])
    borders = [
        [stage.end_section for stage in choice.plan.pipelines[0].stages]
        for choice in (
            simple_plan(sections=sections, num_workers=2, batch_size=8, num_stages=2),
            simple_plan(sections=sections, num_workers=2, batch_size=8, num_stages=2, memory_bytes=4 * 200),
            simple_plan(sections=sections, num_workers=2, batch_size=8, num_stages=2, memory_bytes=4 * 100),
        )
    ]
    assert borders == [[1, 4], [2, 4], [1, 4]]


@pytest.mark.parametrize(
    ("num_workers", "num_stages", "batch_size", "size"),
    [
        (4, 2, 64, 4),
        (4, 2, 63, 4),
        (4, 2, 60, 2),
        (1, 1, 64, 16),
        (4, 4, 16, 1),
        (4, 4, 3, 1),
        (8, 1, 1024, 32),
        (1, 1, 1, 1),
    ],
)
def test_default_micro_batch_size(num_workers, num_stages, batch_size, size):
    plan = plan_of(num_workers=num_workers, num_stages=num_stages, batch_size=batch_size).plan
    assert plan.micro_batch_size == size
    if size > 1:
        assert min(pipeline.num_micro_batches for pipeline in plan.pipelines) >= 4 * num_stages


def test_fewer_micro_batches_than_pipelines_leave_spares():
    choice = plan_of(num_workers=4, num_stages=1, batch_size=6, micro_batch_size=3)
    assert len(choice.plan.pipelines) == 2
    assert "2 of 4 possible pipelines" in choice.reason


def test_schedule_and_recompute():
    assert plan_of().plan.schedule == "varuna"
    assert plan_of(schedule="gpipe").plan.schedule == "gpipe"
    for recompute, flags in [(None, [False] * 2), (True, [True] * 2), ([False, True], [False, True])]:
        stages = plan_of(num_stages=2, recompute=recompute, schedule="gpipe").plan.pipelines[1].stages
        assert [stage.recompute for stage in stages] == flags


@pytest.mark.parametrize("schedule", ["varuna", "1f1b"])
def test_the_last_stage_never_recomputes_where_its_backward_follows_at_once(schedule):
    stages = plan_of(num_stages=2, recompute=True, schedule=schedule).plan.pipelines[0].stages
    assert [stage.recompute for stage in stages] == [True, False]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 9, "num_workers": 16}, ["9 stages", "the model has 8", "cut points"]),
        ({"num_stages": 5}, ["5 stages", "there are 4", "at most 4"]),
        ({"num_stages": 0}, ["num_stages=0"]),
        ({"micro_batch_size": 65}, ["64 samples", "micro-batches of 65", "from 1 to 64"]),
        ({"micro_batch_size": 0}, ["micro-batches of 0"]),
        ({"batch_size": 0}, ["batch_size=0"]),
        ({"num_workers": 0}, ["num_workers=0"]),
        ({"schedule": "zigzag"}, ["'zigzag'", "varuna, 1f1b, gpipe"]),
        ({"schedule": ""}, ["''", "varuna, 1f1b, gpipe"]),
        ({"num_stages": 2, "recompute": [True]}, ["[True]", "1 entries", "2 stages"]),
        ({"flops": ()}, ["no sections"]),
    ],
)
def test_errors_say_values_and_what_to_do(arguments, words):
    with pytest.raises(PlanError) as error:
        plan_of(**arguments)
    for word in words:
        assert word in str(error.value)
