"""The next generation: who is in it, with which plan, and what moves. Pure: from values to a value."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from varuna.errors import UserError
from varuna.generations import Formation
from varuna.morph.messages import Described
from varuna.morph.planning import PlanFor, Planned
from varuna.morph.recovery import LostSections
from varuna.morph.slowness import share_out
from varuna.morph.transfer import place, transfers_of


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A worker that could be in the next generation.

    Attributes:
        incarnation, machine: which, and where.
        held: sections it has, up to date.
        has_state: it knows what every member knows besides its sections; False for newcomers.
        speed: as a share of its peers'.
        rests: it is too slow to get work, if the others can do without it.
        leaving: it was asked to go; ``deadline_s`` is when, on any clock, None if that is not known.
        store_address: of the store that it offers.
        num_calls: of those that no step depends on, how many are over there.
    """

    incarnation: str
    machine: str = ""
    held: frozenset[int] = field(default_factory=frozenset)
    has_state: bool = False
    speed: float = 1.0
    rests: bool = False
    leaving: bool = False
    deadline_s: float | None = None
    store_address: str = ""
    num_calls: int = 0


@dataclass(frozen=True, kw_only=True)
class Arrangement:
    """The next generation.

    Attributes:
        members: by rank.
        formations: of each.
        planned: what the planner said; its plan before workers had places.
        givers: members without a stage that only give their sections away, because they will leave.
        notes: what people should know.
    """

    members: tuple[str, ...]
    formations: tuple[Formation, ...]
    planned: Planned
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
    *,
    from_checkpoint: bool = False,
) -> Arrangement | NoPlan | LostSections | LostState:
    """The next generation from those that could be in it.

    Args:
        generation: its number.
        next_step: the step it begins with.
        candidates: survivors in the order of their ranks, then newcomers.
        described: the job.
        plan_for: see ``PlanFor``.
        from_checkpoint: what candidates hold and know is void; they take it from a checkpoint.
    """
    num_sections = len(described.sections)
    if from_checkpoint:
        candidates = [replace(one, held=frozenset(), has_state=True) for one in candidates]
    found = frozenset().union(*(candidate.held for candidate in candidates))
    lost = tuple(section for section in range(num_sections) if section not in found)
    if lost and not from_checkpoint:
        return LostSections(sections=lost)
    planned, chosen, notes = _choose(candidates, described, plan_for)
    if isinstance(planned, NoPlan):
        return planned
    givers = _givers([one for one in candidates if one not in chosen], num_sections, candidates)
    members = [one for one in candidates if one in chosen or one in givers or not one.leaving]
    informed = [rank for rank, member in enumerate(members) if member.has_state]
    if not informed:
        return LostState()
    state_rank = min(informed, key=lambda rank: members[rank].num_calls)  # newcomers begin where it still is
    ranks = [rank for rank, member in enumerate(members) if member in chosen]
    held = {rank: member.held for rank, member in enumerate(members)}
    plan = place(planned.plan, ranks, len(members), held, described.sections)
    plan = share_out(plan, {rank: members[rank].speed for rank in ranks})
    machines = [member.machine for member in members]
    transfers = () if from_checkpoint else transfers_of(plan, held, machines, described.sections)
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
                store_address=members[0].store_address,
            )
            for rank in range(len(members))
        ),
        planned=planned,
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


def _choose(
    candidates: Sequence[Candidate], described: Described, plan_for: PlanFor
) -> tuple[Planned | NoPlan, list[Candidate], list[str]]:
    """The plan, who gets its places, and notes: without those that rest or leave, if it can be done without."""
    working = [one for one in candidates if not one.rests and not one.leaving]
    staying = [one for one in candidates if not one.leaving]
    notes: list[str] = []
    planned: Planned | NoPlan = NoPlan(reason="no worker is left that stays")
    for chosen in (working, staying, list(candidates)):
        more = [one.incarnation for one in chosen if one not in working]
        if notes and not more:
            continue
        without = planned
        planned = try_plan(plan_for, len(chosen), described)
        if isinstance(planned, Planned):
            if more and isinstance(without, NoPlan):
                notes.append(f"{', '.join(more)} cannot be spared: {without.reason}")
            if planned.note:
                notes.append(planned.note)
            return planned, chosen, notes
    return planned, [], notes


def _givers(others: Sequence[Candidate], num_sections: int, candidates: Sequence[Candidate]) -> list[Candidate]:
    """Leaving workers whose sections nobody has that stays; those that can stay longest, as few as will do."""
    leavers = [one for one in others if one.leaving]
    missing = set(range(num_sections)).difference(*(one.held for one in candidates if one not in leavers))
    givers = []
    for leaver in sorted(leavers, key=_longest_first):
        if leaver.held & missing:
            givers.append(leaver)
            missing -= leaver.held
    return givers


def _longest_first(candidate: Candidate) -> float:
    return float("-inf") if candidate.deadline_s is None else -candidate.deadline_s
