from __future__ import annotations

import random

import pytest

from varuna.plan import SCHEDULES, TaskKind, pipeline_schedules
from varuna.plan.simulate import StageTimes, constant_durations, ideal_makespan, simulate_step

MS = StageTimes(forward_s=0.020, backward_s=0.040)


def efficiency(name, num_stages, *, slow_stage=None, max_in_flight=0, num_runs=10):
    """Time without bubbles over mean simulated time: 32 micro-batches, messages 5 ± 5 ms one way."""
    factors = [1.5 if index == slow_stage else 1.0 for index in range(num_stages)]
    times = [
        StageTimes(forward_s=0.020 * factor, backward_s=0.040 * factor, weight_s=0.020 * factor)
        for factor in factors
    ]
    schedules = pipeline_schedules(
        name,
        num_stages=num_stages,
        num_micro_batches=32,
        recompute=[False] * num_stages,
        max_in_flight=max_in_flight,
    )
    total_s = 0.0
    for seed in range(num_runs):
        rng = random.Random(seed)
        result = simulate_step(
            schedules,
            duration_s=constant_durations(times, split=schedules[0].split),
            latency_s=lambda _stage, _task, rng=rng: rng.uniform(0.0, 0.010),
        )
        total_s += result.makespan_s
    return 32 * 0.060 * max(factors) / (total_s / num_runs)


@pytest.mark.parametrize("num_stages", [1, 2, 3, 4, 8, 16])
@pytest.mark.parametrize("name", SCHEDULES)
def test_equal_stages_and_free_messages_give_the_closed_form(name, num_stages):
    for num_micro_batches in (num_stages, num_stages + 3, 4 * num_stages):
        measured = ideal_makespan(
            name, times=[MS] * num_stages, num_micro_batches=num_micro_batches, recompute=[False] * num_stages
        )
        assert measured == pytest.approx((num_micro_batches + num_stages - 1) * 0.060)


def test_gpipe_with_recompute_has_its_closed_form():
    times = [StageTimes(forward_s=1, backward_s=2, recompute_s=1)] * 4
    measured = ideal_makespan("gpipe", times=times, num_micro_batches=8, recompute=[True] * 4)
    # forwards of all; then on the last stage R and B of all, then the last gradient's way back
    assert measured == pytest.approx((8 + 3) * 1 + 8 * 3 + 3 * 2)


@pytest.mark.parametrize("num_stages", [2, 4, 8, 16])
def test_varuna_with_recompute_is_never_slower_than_the_others(num_stages):
    times = [StageTimes(forward_s=1, backward_s=2, recompute_s=1)] * num_stages
    for num_micro_batches in (1, num_stages, 2 * num_stages, 4 * num_stages):
        ideal = {
            name: ideal_makespan(
                name, times=times, num_micro_batches=num_micro_batches, recompute=[True] * num_stages
            )
            for name in SCHEDULES
        }
        assert ideal["varuna"] == min(ideal.values())


@pytest.mark.parametrize(
    ("num_stages", "slow_stage", "at_least", "at_most_1f1b"),
    [
        (4, None, 0.895, 0.82),
        (8, None, 0.79, 0.72),
        (4, 1, 0.97, 0.96),
        (4, 2, 0.95, 0.95),
        (8, 1, 0.965, 0.90),
        (8, 4, 0.905, 0.88),
    ],
)
def test_varuna_stands_jitter(num_stages, slow_stage, at_least, at_most_1f1b):
    assert efficiency("varuna", num_stages, slow_stage=slow_stage) >= at_least
    assert efficiency("1f1b", num_stages, slow_stage=slow_stage) <= at_most_1f1b


@pytest.mark.parametrize("slow_stage", [None, 1, 2])
@pytest.mark.parametrize("num_stages", [4, 8])
def test_zero_bubble_stands_jitter_better_than_varuna(num_stages, slow_stage):
    ours = efficiency("zero-bubble", num_stages, slow_stage=slow_stage)
    assert ours > efficiency("varuna", num_stages, slow_stage=slow_stage) + 0.005


def zero_bubble(num_stages, num_micro_batches, *, recompute=False, name="zero-bubble"):
    """F, R, B and W 20 ms each, messages 0.3 ms; and the time without bubbles or recompute over that taken."""
    times = [StageTimes(forward_s=0.02, recompute_s=0.02, backward_s=0.04, weight_s=0.02)] * num_stages
    schedules = pipeline_schedules(
        name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        recompute=[recompute] * num_stages,
    )
    durations = constant_durations(times, split=schedules[0].split)
    result = simulate_step(schedules, duration_s=durations, latency_s=0.0003)
    return result, num_micro_batches * 0.06 / result.makespan_s


@pytest.mark.parametrize(
    ("num_stages", "num_micro_batches", "at_least"),
    [(8, 16, 0.87), (8, 32, 0.93), (4, 32, 0.968), (16, 32, 0.86)],
)
def test_zero_bubble_comes_near_its_bound_with_the_sets_that_are_stated(
    num_stages, num_micro_batches, at_least
):
    result, ours = zero_bubble(num_stages, num_micro_batches)
    bound = num_micro_batches / (num_micro_batches + (num_stages - 1) / 3)
    assert at_least <= ours <= bound
    assert max(result.peak_held) <= num_stages + num_stages // 2 + 2


@pytest.mark.parametrize(("num_micro_batches", "gain"), [(16, 1.1), (32, 1.06)])
def test_zero_bubble_with_recompute_is_clearly_faster_than_1f1b(num_micro_batches, gain):
    result, ours = zero_bubble(8, num_micro_batches, recompute=True)
    assert ours > gain * zero_bubble(8, num_micro_batches, recompute=True, name="1f1b")[1]
    assert max(result.peak_held) <= 4


def test_a_slow_early_stage_does_not_starve_its_successors():
    """A stage that always preferred backwards would run them in bursts here, and reach 0.83."""
    for max_in_flight in (12, 14, 16):
        assert efficiency("varuna", 8, slow_stage=1, max_in_flight=max_in_flight) >= 0.93


def test_more_in_flight_is_faster_until_the_round_trip_is_covered():
    measured = [efficiency("varuna", 4, max_in_flight=limit) for limit in (1, 2, 4, 6, 10)]
    assert measured == sorted(measured)
    assert measured[0] < 0.35
    assert measured[-1] - measured[-2] < 0.03


def test_messages_of_a_channel_do_not_overtake():
    latencies = iter([5.0, 0.0, 0.0])
    schedules = pipeline_schedules("gpipe", num_stages=2, num_micro_batches=3, recompute=[False] * 2)
    result = simulate_step(
        schedules,
        duration_s=lambda _stage, _task: 1.0,
        latency_s=lambda _stage, task: next(latencies) if task.kind is TaskKind.FORWARD else 0.0,
    )
    assert [span.start_s for span in result.timelines[1]] == [6.0, 7.0, 8.0, 9.0, 10.0, 11.0]


def test_latency_counts_on_every_hop():
    schedules = pipeline_schedules("varuna", num_stages=3, num_micro_batches=1, recompute=[False] * 3)
    result = simulate_step(schedules, duration_s=constant_durations([MS] * 3), latency_s=0.5)
    assert result.makespan_s == pytest.approx(3 * 0.060 + 4 * 0.5)
    assert result.peak_in_flight == (1, 1, 1)
    assert [str(span.task) for span in result.timelines[0]] == ["F0", "B0"]


def test_stages_that_wait_for_each_other_are_shown():
    short = pipeline_schedules("gpipe", num_stages=2, num_micro_batches=2, recompute=[False] * 2)
    long = pipeline_schedules("gpipe", num_stages=2, num_micro_batches=3, recompute=[False] * 2)
    with pytest.raises(AssertionError, match=r"wait for each other: .*stage 1 of 2"):
        simulate_step([short[0], long[1]], duration_s=lambda _stage, _task: 1.0)
