"""From one generation to the next: what members report, what they are told. Values; standard library only.

A *generation* is one membership with one plan. A member whose generation has ended *halts*: it reports where it
stands (``HaltReport``) and waits for a ``Verdict``.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class SectionTransfer:
    """One section's state goes from a worker that holds it to one that will: ranks of the new generation."""

    section_index: int
    source: int
    destination: int


@dataclass(frozen=True, kw_only=True)
class Formation:
    """How the next generation begins, for one of its workers.

    Attributes:
        generation: its number, never used before.
        rank, size: this worker among its members, spares included.
        plan: its layout.
        transfers: in one order for all members: each takes part in its own, as source or destination.
        state_rank: the member whose learning-rate scheduler, loss scale and step count the others take.
        next_step: the step it begins with.
    """

    generation: int
    rank: int
    size: int
    plan: Plan
    transfers: tuple[SectionTransfer, ...]
    state_rank: int
    next_step: int


@dataclass(frozen=True, kw_only=True)
class HaltReport:
    """Where a member stands when its generation has ended here.

    Attributes:
        generation: the one that ended.
        num_applied: steps whose update has been made here; the next step's index.
        reduced_step: a step whose gradients are reduced here and whose commit did not return.
        committed_step: the newest step whose commit returned here; None before the first.
        committed: what that commit returned, as text that only members read.
        held_sections: what this worker has, up to date.
        reason: why it halted, for people.
    """

    generation: int
    num_applied: int
    reduced_step: int | None
    committed_step: int | None
    committed: str
    held_sections: tuple[int, ...]
    reason: str


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What a halted member does next.

    Attributes:
        formation: the next generation.
        committed: what the commit of the step that it had reduced returned elsewhere; empty if it did not.
    """

    formation: Formation
    committed: str = ""
