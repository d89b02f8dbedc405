"""How fast a device is from step to step, and what that makes of predictions."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plan.profiles import make_plan, make_profile
from varuna.plan.cluster import Cluster
from varuna.plan.pace import Draw, drawn_paces, share_that_lasts
from varuna.plan.predict import predict

QUANTILES = tuple(np.linspace(0.7, 1.3, 21).tolist())
FOR_EVER = 1e9
ONE = Cluster.parse("1x8")


def test_a_device_that_is_always_as_fast_has_no_pace():
    assert drawn_paces(make_profile(), np.ones(4), Draw(0, 0, 5, 0)).tolist() == [1.0] * 4


def test_runs_have_the_right_mean_and_every_device_an_order_of_its_own():
    profile = make_profile(compute_jitter=QUANTILES, compute_jitter_s=FOR_EVER)
    paces = np.array([drawn_paces(profile, np.ones(3), Draw(7, run, 8, 0)) for run in range(8)])
    assert paces.mean(axis=0) == pytest.approx(1.0)
    assert sorted(paces[:, 0]) == pytest.approx(np.interp((np.arange(8) + 0.5) / 8, [0, 1], [0.7, 1.3]))
    assert len({tuple(column) for column in paces.T.tolist()}) == 3
    again = drawn_paces(profile, np.ones(3), Draw(7, 5, 8, 0))
    assert again.tolist() == paces[5].tolist()
    others = drawn_paces(profile, np.ones(3), Draw(7, 5, 8, 1))
    assert others.tolist() != paces[5].tolist()


@pytest.mark.parametrize("seconds", [0.02, 0.3, 1.0, 5.0, 40.0])
def test_what_lasts_is_that_of_the_mean_of_a_process_whose_correlation_falls(seconds: float):
    """Against such a process itself, a thousand values a second."""
    lasts_s, step_s = 0.5, 1e-3
    rng = np.random.default_rng(3)
    kept = np.exp(-step_s / lasts_s)
    count = round(seconds / step_s)
    values = rng.standard_normal(4000)
    total = np.zeros(4000)
    for _ in range(count):
        total += values
        values = kept * values + np.sqrt(1 - kept**2) * rng.standard_normal(4000)
    assert share_that_lasts(seconds, lasts_s) == pytest.approx(float((total / count).std()), rel=0.05)


def test_one_device_takes_as_long_on_average():
    profile = make_profile(compute_jitter=QUANTILES, compute_jitter_s=FOR_EVER)
    steady = predict(make_plan([[0, 4]], [3]), make_profile(), ONE)
    assert predict(make_plan([[0, 4]], [3]), profile, ONE, num_runs=10).step_s == pytest.approx(steady.step_s)


def test_replicas_wait_for_the_slower_one():
    """The mean of the larger of two drawn evenly from 0.7 to 1.3 is 1.1."""
    profile = make_profile(compute_jitter=QUANTILES, compute_jitter_s=FOR_EVER)
    plan = make_plan([[0, 4], [0, 4]], [3, 3])
    steady = predict(plan, make_profile(), ONE)
    jittered = predict(plan, profile, ONE, num_runs=400)
    assert jittered.reduce_s == pytest.approx(steady.reduce_s)
    last_s = steady.step_s - steady.reduce_s
    assert jittered.step_s - jittered.reduce_s == pytest.approx(1.1 * last_s, rel=0.01)


def test_paces_that_do_not_last_average_out():
    plan = make_plan([[0, 4], [0, 4]], [3, 3])
    brief = make_profile(compute_jitter=QUANTILES, compute_jitter_s=1e-6)
    steady = predict(plan, make_profile(), ONE)
    assert predict(plan, brief, ONE, num_runs=50).step_s == pytest.approx(steady.step_s, rel=1e-3)


def test_a_pipeline_waits_for_its_slowest_stage():
    profile = make_profile(compute_jitter=QUANTILES, compute_jitter_s=FOR_EVER)
    plan = make_plan([[0, 1, 2, 3, 4]], [64])
    steady = predict(plan, make_profile(), ONE)
    slowest = np.random.default_rng(0).uniform(0.7, 1.3, (100_000, 4)).max(axis=1).mean()
    assert predict(plan, profile, ONE, num_runs=200).step_s == pytest.approx(slowest * steady.step_s, rel=0.02)
