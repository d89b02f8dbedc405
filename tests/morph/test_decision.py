"""When newcomers are taken in: never for nothing, never later than pays, and always with a reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.morph.decision import JoinAction, JoinOutlook, decide_join, morph_cost_s

OUTLOOK = JoinOutlook(
    num_ready=1,
    num_starting=0,
    step_s=1.0,
    step_with_s=0.75,
    morph_s=0.5,
    ready_since_s=100.0,
    arrivals_s=(100.0,),
)


def test_a_faster_layout_is_taken() -> None:
    verdict = decide_join(OUTLOOK, 100.0)
    assert verdict.action is JoinAction.MORPH
    assert verdict.reason == "1 ready newcomer: morph now, a step would take 0.75 s instead of 1 s"


@pytest.mark.parametrize("step_with_s", [1.0, 1.2, 0.995])
def test_no_gain_no_morph(step_with_s: float) -> None:
    verdict = decide_join(replace(OUTLOOK, step_with_s=step_with_s), 100.0)
    assert verdict.action is JoinAction.STAY
    assert "stay" in verdict.reason


def test_a_job_that_is_nearly_done_is_left_alone() -> None:
    """0.25 s saved per second for 1.5 s is less than a morph of 0.5 s; for 3 s it is more."""
    short = decide_join(replace(OUTLOOK, num_steps_left=1), 100.0)
    assert (short.action, short.reason) == (
        JoinAction.STAY,
        "1 ready newcomer: stay, a morph of 0.5 s would not pay in the 1 s left",
    )
    assert decide_join(replace(OUTLOOK, num_steps_left=3), 100.0).action is JoinAction.MORPH


def test_it_waits_for_those_that_were_started_until_waiting_costs_a_morph() -> None:
    starting = replace(OUTLOOK, num_starting=2)
    verdict = decide_join(starting, 100.0)
    assert verdict.action is JoinAction.WAIT
    assert verdict.until_s == pytest.approx(102.0), "0.25 s lost per second: after 2 s one morph"
    assert decide_join(starting, 102.0).action is JoinAction.MORPH


def test_it_waits_while_newcomers_keep_coming() -> None:
    coming = replace(OUTLOOK, arrivals_s=(99.0, 99.5, 100.0))
    verdict = decide_join(coming, 100.0)
    assert (verdict.action, verdict.until_s) == (JoinAction.WAIT, 101.0)
    assert decide_join(coming, 101.0).action is JoinAction.MORPH, "the next one did not come"


def test_it_does_not_wait_where_newcomers_are_rare() -> None:
    rare = replace(OUTLOOK, arrivals_s=(10.0, 55.0, 100.0))
    assert decide_join(rare, 100.0).action is JoinAction.MORPH


def test_the_cost_is_the_median_of_what_was_measured() -> None:
    assert morph_cost_s([]) == 0.5
    assert morph_cost_s([0.2, 9.0, 0.3]) == 0.3


@given(
    num_starting=st.integers(0, 3),
    step_with_s=st.floats(0.1, 2.0),
    morph_s=st.floats(0.01, 20.0),
    waited_s=st.floats(0.0, 100.0),
    gaps_s=st.lists(st.floats(0.0, 50.0), max_size=6),
)
def test_waiting_never_costs_more_than_a_morph(
    num_starting: int, step_with_s: float, morph_s: float, waited_s: float, gaps_s: list[float]
) -> None:
    now_s = 100.0 + waited_s
    arrivals = [100.0]
    for gap_s in gaps_s:
        arrivals.append(min(arrivals[-1] + gap_s, now_s))
    outlook = replace(
        OUTLOOK,
        num_starting=num_starting,
        step_with_s=step_with_s,
        morph_s=morph_s,
        arrivals_s=tuple(arrivals),
    )
    verdict = decide_join(outlook, now_s)
    assert verdict.reason
    assert (verdict.until_s is not None) == (verdict.action is JoinAction.WAIT)
    if verdict.until_s is not None:
        assert verdict.until_s > now_s
        assert (verdict.until_s - 100.0) * (1 - step_with_s) <= morph_s * 1.0001
