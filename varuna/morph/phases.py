"""Where a job stands, and which way it can go from there; drawn in ``docs/concepts/morph-states.md``.

A *phase* is the manager's; it says nothing about what single workers do.
"""

from __future__ import annotations

import enum


class Phase(enum.Enum):
    """Where a job stands."""

    FOUNDING = "founding"
    """The workers that were started together form generation 0 by themselves."""
    RUNNING = "running"
    """A generation trains."""
    PAUSING = "pausing"
    """All members were asked to end the generation after a step."""
    ENDING = "ending"
    """A member is gone or halted by itself: the others were told to give up, and report."""
    WAITING = "waiting"
    """All have halted, but nobody can go on until a newcomer is ready."""
    FORMING = "forming"
    """Members were told the next generation and open it."""
    FINISHING = "finishing"
    """The script of at least one member is over; it stays until those of all are."""
    FAILED = "failed"
    """The job cannot go on; the reason is known."""
    DONE = "done"
    """The script has ended well."""


TRANSITIONS: dict[Phase, tuple[Phase, ...]] = {
    Phase.FOUNDING: (Phase.RUNNING, Phase.ENDING, Phase.FINISHING, Phase.FAILED),
    Phase.RUNNING: (Phase.PAUSING, Phase.ENDING, Phase.FINISHING, Phase.FAILED),
    Phase.PAUSING: (Phase.FORMING, Phase.WAITING, Phase.ENDING, Phase.FINISHING, Phase.FAILED),
    Phase.ENDING: (Phase.FORMING, Phase.WAITING, Phase.FAILED, Phase.DONE),
    Phase.WAITING: (Phase.FORMING, Phase.FAILED, Phase.DONE),
    Phase.FORMING: (Phase.RUNNING, Phase.ENDING, Phase.FINISHING, Phase.FAILED),
    Phase.FINISHING: (Phase.ENDING, Phase.FAILED, Phase.DONE),
    Phase.FAILED: (),
    Phase.DONE: (),
}
"""Per phase, those that may follow it."""

ENDED = frozenset({Phase.FAILED, Phase.DONE})
"""Phases without an exit."""
