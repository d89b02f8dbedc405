"""Whether a morph pays for newcomers that are ready: stay, morph now, or wait for more of them. Pure.

A morph costs the same for one newcomer as for several. What waiting costs grows with time. So, as with hiring
or buying skis: as long as more are likely to come, wait, but never longer than until waiting has cost as much
as one morph; this is never worse than twice the best that could have been done.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import median

MIN_GAIN = 0.01
"""Share of a step that newcomers must save: less than this is within what predictions are off by."""

HORIZON_S = 600.0
"""How long a new layout is taken to last where the end of the job is not known."""

DEFAULT_MORPH_S = 0.5
"""What a morph is taken to cost before one was measured."""


class JoinAction(enum.Enum):
    """What to do with newcomers."""

    STAY = "stay"
    MORPH = "morph"
    WAIT = "wait"


@dataclass(frozen=True, kw_only=True)
class JoinOutlook:
    """What is known when newcomers are ready. Times on one clock.

    Attributes:
        num_ready, num_starting: newcomers that are ready, and that were started and are not.
        step_s: seconds of a step now.
        step_with_s: the same with them.
        morph_s: what a morph costs; see ``morph_cost_s``.
        ready_since_s: when the first of them was ready.
        arrivals_s: when recent newcomers were ready, oldest first, these included.
        num_steps_left: None if not known.
    """

    num_ready: int
    num_starting: int
    step_s: float
    step_with_s: float
    morph_s: float
    ready_since_s: float
    arrivals_s: Sequence[float]
    num_steps_left: int | None = None


@dataclass(frozen=True, kw_only=True)
class JoinVerdict:
    """What to do, until when if it is to wait, and why."""

    action: JoinAction
    reason: str
    until_s: float | None = None


def morph_cost_s(costs_s: Sequence[float]) -> float:
    """Seconds that a morph costs: the median of those measured."""
    return median(costs_s) if costs_s else DEFAULT_MORPH_S


def decide_join(outlook: JoinOutlook, now_s: float) -> JoinVerdict:
    """Whether to take newcomers in."""
    who = f"{outlook.num_ready} ready newcomer{'s' if outlook.num_ready > 1 else ''}"
    gain = 1.0 - outlook.step_with_s / outlook.step_s
    steps = f"a step would take {outlook.step_with_s:.3g} s instead of {outlook.step_s:.3g} s"
    if gain < MIN_GAIN:
        return JoinVerdict(action=JoinAction.STAY, reason=f"{who}: stay, {steps}")
    left_s = HORIZON_S
    if outlook.num_steps_left is not None:
        left_s = min(left_s, outlook.num_steps_left * outlook.step_s)
    if gain * left_s <= outlook.morph_s:
        return JoinVerdict(
            action=JoinAction.STAY,
            reason=f"{who}: stay, a morph of {outlook.morph_s:.2g} s would not pay in the {left_s:.3g} s left",
        )
    most_s = outlook.ready_since_s + outlook.morph_s / gain
    next_s = _next_arrival_s(outlook, now_s)
    if next_s is not None and next_s <= most_s and now_s < most_s:
        until_s = most_s if outlook.num_starting else next_s
        return JoinVerdict(
            action=JoinAction.WAIT,
            until_s=until_s,
            reason=f"{who}: wait {until_s - now_s:.2g} s for more, {steps}",
        )
    return JoinVerdict(action=JoinAction.MORPH, reason=f"{who}: morph now, {steps}")


def _next_arrival_s(outlook: JoinOutlook, now_s: float) -> float | None:
    """When the next newcomer should have come, None if none is likely to."""
    if outlook.num_starting:
        return now_s
    gaps = [later - earlier for earlier, later in pairwise(outlook.arrivals_s)]
    if len(gaps) < 2:
        return None
    expected_s = outlook.arrivals_s[-1] + 2 * median(gaps[-5:])
    return expected_s if expected_s > now_s else None
