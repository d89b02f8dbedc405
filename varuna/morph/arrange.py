"""The next generation: who is in it, with which plan, and what moves. Pure: from values to a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from varuna.errors import UserError
from varuna.generations import Formation
from varuna.morph.messages import Described
from varuna.morph.planning import PlanFor, Planned
from varuna.morph.recovery import LostSections
from varuna.morph.transfer import place, transfers_of


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A worker that could be in the next generation.

    Attributes:
        incarnation, machine: which, and where.
        held: sections it has, up to date.
        has_state: it knows what every member knows besides its sections; False for newcomers.
        leaving: it was asked to go; ``deadline_s`` is when, on any clock, None if that is not known.
    """

    incarnation: str
    machine: str = ""
    held: frozenset[int] = field(default_factory=frozenset)
    has_state: bool = False
    leaving: bool = False
    deadline_s: float | None = None


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The next generation.

    Attributes:
        members: by rank.
        formations: of each.
        step_s: predicted seconds of a step, None without a prediction.
        givers: members without a stage that only give their sections away, because they will leave.
        notes: what people should know.
    """

    members: tuple[str, ...]
    formations: tuple[Formation, ...]
    step_s: float | None
    givers: tuple[str, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class NoPlan:
    """Nobody can go on for now, and why."""

    reason: str


@dataclass(frozen=True, kw_only=True)
class LostState:
    """Sections are there, but nobody who knows schedulers, loss scale and step count."""


def arrange(
    generation: int,
    next_step: int,
    candidates: Sequence[Candidate],
    described: Described,
    plan_for: PlanFor,
) -> Arrangement | NoPlan | LostSections | LostState:
    """The next generation from those that could be in it.

    Args:
        generation: its number.
        next_step: the step it begins with.
        candidates: survivors in the order of their ranks, then newcomers.
        described: the job.
        plan_for: see ``PlanFor``.
    """
    num_sections = len(described.sections)
    found = frozenset().union(*(candidate.held for candidate in candidates))
    lost = tuple(section for section in range(num_sections) if section not in found)
    if lost:
        return LostSections(sections=lost)
    stayers = [candidate for candidate in candidates if not candidate.leaving]
    planned = try_plan(plan_for, len(stayers), described)
    notes: list[str] = []
    givers: list[Candidate] = []
    if isinstance(planned, Planned):
        givers = _givers(candidates, num_sections)
    else:
        leavers = [candidate.incarnation for candidate in candidates if candidate.leaving]
        if not leavers:
            return planned
        without = planned
        planned = try_plan(plan_for, len(candidates), described)
        if not isinstance(planned, Planned):
            return planned
        stayers = list(candidates)
        notes.append(f"{', '.join(leavers)} cannot be spared yet: {without.reason}")
    if planned.note:
        notes.append(planned.note)
    members = [candidate for candidate in candidates if candidate in stayers or candidate in givers]
    state_rank = next((rank for rank, member in enumerate(members) if member.has_state), None)
    if state_rank is None:
        return LostState()
    ranks = [rank for rank, member in enumerate(members) if member in stayers]
    held = {rank: member.held for rank, member in enumerate(members)}
    plan = place(planned.plan, ranks, len(members), held, described.sections)
    machines = [member.machine for member in members]
    transfers = transfers_of(plan, held, machines, described.sections)
    return Arrangement(
        members=tuple(member.incarnation for member in members),
        formations=tuple(
            Formation(
                generation=generation,
                rank=rank,
                size=len(members),
                plan=plan,
                transfers=transfers,
                state_rank=state_rank,
                next_step=next_step,
            )
            for rank in range(len(members))
        ),
        step_s=planned.step_s,
        givers=tuple(giver.incarnation for giver in givers),
        notes=tuple(notes),
    )


def try_plan(plan_for: PlanFor, num_workers: int, described: Described) -> Planned | NoPlan:
    """A plan, or why there is none."""
    if num_workers == 0:
        return NoPlan(reason="no worker is left that stays")
    try:
        return plan_for(num_workers, described)
    except UserError as error:
        return NoPlan(reason=str(error))


def _givers(candidates: Sequence[Candidate], num_sections: int) -> list[Candidate]:
    """Leaving workers whose sections nobody has that stays; those that can stay longest, as few as will do."""
    missing = set(range(num_sections)).difference(
        *(candidate.held for candidate in candidates if not candidate.leaving)
    )
    givers = []
    leavers = [candidate for candidate in candidates if candidate.leaving]
    for leaver in sorted(leavers, key=_longest_first):
        if leaver.held & missing:
            givers.append(leaver)
            missing -= leaver.held
    return givers


def _longest_first(candidate: Candidate) -> float:
    return float("-inf") if candidate.deadline_s is None else -candidate.deadline_s
