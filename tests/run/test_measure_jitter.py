"""What passes that were timed in turn say of a device's pace."""

from __future__ import annotations

import numpy as np
import pytest

from varuna.run.measure_jitter import ComputeJitter, TimedPass, jitter_of, joined


def passes(seconds: list[float], every_s: float = 0.1, start_s: float = 0.0) -> list[TimedPass]:
    return [TimedPass(ended_s=start_s + every_s * index, seconds=one) for index, one in enumerate(seconds)]


def wandering(count: int, lasts_s: float, spread: float, every_s: float = 0.1) -> list[float]:
    """Of a device whose pace's correlation is 1/e after ``lasts_s``."""
    rng = np.random.default_rng(1)
    kept = np.exp(-every_s / lasts_s)
    value, values = rng.standard_normal(), []
    for _ in range(count):
        values.append(0.05 * (1 + spread * value))
        value = kept * value + np.sqrt(1 - kept**2) * rng.standard_normal()
    return values


def test_nothing_is_said_of_few_passes_or_of_a_steady_device():
    assert jitter_of([]) == ComputeJitter()
    assert jitter_of([passes([1.0])]) == ComputeJitter()
    assert jitter_of([passes([1.0, 0.9, 1.1] * 5)]) == ComputeJitter()
    assert jitter_of([passes([1.0, 1.001, 0.999] * 10)]) == ComputeJitter()


@pytest.mark.parametrize("lasts_s", [0.3, 1.0])
def test_spread_and_how_long_it_lasts(lasts_s: float):
    found = jitter_of([passes(wandering(4000, lasts_s, 0.08))])
    drawn = np.interp(np.random.default_rng(2).random(20_000), np.linspace(0, 1, 21), found.quantiles)
    assert drawn.mean() == pytest.approx(1.0, abs=0.005)
    assert drawn.std() == pytest.approx(0.08, rel=0.15)
    assert found.lasts_s == pytest.approx(lasts_s, rel=0.3)


def test_sizes_are_compared_with_themselves():
    """Passes of two sizes in turn: that one takes four times as long is no jitter."""
    small, large = wandering(200, 1.0, 0.05), [4 * one for one in wandering(200, 1.0, 0.05)]
    found = jitter_of([passes(small, 0.2), passes(large, 0.2, 0.1)])
    alone = jitter_of([passes(small, 0.2)])
    assert np.std(found.quantiles) == pytest.approx(np.std(alone.quantiles), rel=0.05)


def test_the_first_pass_and_what_was_held_up_do_not_count():
    usual = wandering(200, 1.0, 0.05)
    disturbed = [5.0, *usual, *[5.0] * 20]
    assert max(jitter_of([passes(disturbed)]).quantiles) == pytest.approx(
        max(jitter_of([passes([1.0, *usual])]).quantiles)
    )


def test_workers_are_joined():
    one = ComputeJitter(quantiles=(0.9, 1.0, 1.1), lasts_s=1.0)
    other = ComputeJitter(quantiles=(0.7, 1.0, 1.3), lasts_s=3.0)
    assert joined([one, ComputeJitter(), other]).quantiles == pytest.approx((0.8, 1.0, 1.2))
    assert joined([one, other]).lasts_s == 2.0
    assert joined([ComputeJitter()]) == ComputeJitter()
