"""Which step comes next when a generation has ended, and who is up to date: the rule of the commit. Pure.

If the commit of a step returned on any member, every member had its gradients reduced: those that have
not seen the outcome are told it and make the same update ("roll forward"). If it returned on none, nobody has
changed, and the step runs again.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from varuna.generations import HaltReport


@dataclass(frozen=True, kw_only=True)
class Recovery:
    """Where the living members of an ended generation stand.

    Attributes:
        next_step: the step with which the next generation begins.
        committed: what the commit of the step before it returned, for those that have to roll forward.
        rolling: members that roll forward.
        current: members that are, or will be, ready for ``next_step``.
        stale: members that cannot come there. The protocol has none; what they hold is not used.
        checkpoint: where everything comes from, if nobody has it any more.
    """

    next_step: int
    committed: str
    rolling: frozenset[str]
    current: frozenset[str]
    stale: frozenset[str]
    checkpoint: str = ""


@dataclass(frozen=True, kw_only=True)
class LostSections:
    """Sections that no living member has up to date."""

    sections: tuple[int, ...]


def recover(
    reports: Mapping[str, HaltReport], first_step: int, *, committed_step: int = -1, committed: str = ""
) -> Recovery:
    """Where the members stand.

    Args:
        reports: of all living members of the generation; at least one.
        first_step: the step with which the generation began. Newcomers that halt before their first step
            report 0 applied steps; what they hold is what was handed to them, of this step.
        committed_step: of the newest commit of the generation that any member has ever told of, those that
            are gone since included.
        committed: what that commit returned.
    """
    assert reports, "nobody has reported"
    applied = {member: max(report.num_applied, first_step) for member, report in reports.items()}
    least = min(applied.values())
    known = [
        (report.committed_step, report.committed)
        for report in reports.values()
        if report.committed_step is not None
    ]
    known += [(committed_step, committed), (least - 1, "")]
    step, text = max(known, key=lambda pair: pair[0])
    next_step = max(step + 1, *applied.values())
    rolling = frozenset(
        member
        for member, report in reports.items()
        if applied[member] == step == next_step - 1 and report.reduced_step == step
    )
    current = rolling | {member for member, number in applied.items() if number == next_step}
    return Recovery(
        next_step=next_step,
        committed=text if step >= least else "",
        rolling=rolling,
        current=current,
        stale=frozenset(reports) - current,
    )
