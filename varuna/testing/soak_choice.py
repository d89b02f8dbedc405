"""Which fault a soak has next: drawn by the seed, fitted to who is there. Pure.

A fault must leave every section a holder, for a soak keeps no checkpoints; and one worker, the *witness*, is
never killed, so that there is somebody whose threads, descriptors and memory can be followed to the end.
"""

from __future__ import annotations

import random
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import msgspec

from varuna.generations import Point
from varuna.morph.views import Status
from varuna.testing.faults import Fault

STEP_POINTS: tuple[Point, ...] = ("step", "forward", "final backward", "reduce", "commit", "committed")
_STAGE_POINTS: tuple[Point, ...] = ("forward", "final backward", "reduce")
JOIN_POINTS: tuple[Point, ...] = ("start", "join", "form")

_WEIGHTS = {
    "kill": 24,
    "kill at any time": 14,
    "kill two": 8,
    "kill while it forms": 10,
    "kill a newcomer": 10,
    "notice": 14,
    "delay": 8,
    "short freeze": 8,
    "kill the manager": 6,
    "freeze": 3,
    "cut": 3,
}


@dataclass(frozen=True, kw_only=True)
class Draw:
    """What chance says about one fault; what can be done of it is another matter.

    Attributes:
        kind: one of ``_WEIGHTS``.
        victims: in which order workers are thought of: numbers from 0 to 1, one for each.
        points: where.
        seconds: how long, if it is a matter of time.
        has_deadline: whether a notice has one.
    """

    kind: str
    victims: tuple[float, ...]
    points: tuple[Point, Point]
    join_point: Point
    seconds: float
    has_deadline: bool


def draw_faults(seed: int, num_faults: int) -> list[Draw]:
    """The same for the same seed."""
    source = random.Random(seed)
    kinds, weights = tuple(_WEIGHTS), tuple(_WEIGHTS.values())
    return [
        Draw(
            kind=source.choices(kinds, weights)[0],
            victims=tuple(source.random() for _ in range(16)),
            points=(source.choice(STEP_POINTS), source.choice(STEP_POINTS)),
            join_point=source.choice(JOIN_POINTS),
            seconds=source.uniform(0.05, 0.4),
            has_deadline=source.random() < 0.5,
        )
        for _ in range(num_faults)
    ]


def can_lose(status: Status, numbers: Collection[int]) -> bool:
    """Whether every section has a holder besides the workers of these numbers, in whatever order they go.

    Between two losses there is a plan for those who are left then: it must have room for two pipelines, or the
    next loss may be that of the only one.
    """
    plan = status.plan
    if plan is None:
        return False
    lost = {worker.rank for worker in status.workers if worker.rank is not None} & _ranks(status, numbers)
    two_pipelines = 2 * len(plan.pipelines[0].stages)
    if len(lost) > 1 and plan.num_workers - (len(lost) - 1) < two_pipelines:
        return False
    staying = set(range(plan.num_workers)) - lost
    return bool(staying) and all(
        staying & set(plan.holders_of(section)) for section in range(plan.num_sections)
    )


def members(status: Status) -> list[int]:
    """Numbers of the living members, by rank."""
    living = [one for one in status.workers if one.status == "member" and one.rank is not None]
    return [number_of(one.incarnation) for one in sorted(living, key=lambda one: one.rank or 0)]


def number_of(incarnation: str) -> int:
    """A worker's number, as in its log's name."""
    return int(incarnation.rsplit(".", 2)[1])


def choose_victims(
    status: Status, draw: Draw, witness: int, count: int, doomed: Collection[int] = ()
) -> tuple[int, ...]:
    """``count`` workers that can be lost together, or fewer; ``doomed`` are lost already, or soon."""
    candidates = [number for number in members(status) if number != witness and number not in doomed]
    pairs = zip(draw.victims, candidates, strict=False)
    chosen: tuple[int, ...] = ()
    for _, number in sorted(pairs):
        if len(chosen) < count and can_lose(status, (*doomed, *chosen, number)):
            chosen = (*chosen, number)
    return chosen


def faults_of(
    draw: Draw, victims: Sequence[int], newcomer: int, spares: Collection[int] = ()
) -> tuple[Fault, ...]:
    """What to put into the script of faults; nothing for what is done from outside.

    Args:
        draw: what chance says.
        victims: who is hit.
        newcomer: the number that the next newcomer will have.
        spares: workers that have no stage, and so do not come to most points.
    """
    faults = _faults_of(draw, victims, newcomer)
    is_far = [fault.worker in spares and fault.point in _STAGE_POINTS for fault in faults]
    return tuple(
        msgspec.structs.replace(fault, point="commit") if far else fault
        for fault, far in zip(faults, is_far, strict=True)
    )


def _faults_of(draw: Draw, victims: Sequence[int], newcomer: int) -> tuple[Fault, ...]:
    first, second = draw.points
    match draw.kind:
        case "kill" | "kill two":
            pairs = zip(victims, (first, second), strict=False)
            return tuple(Fault(what="kill", point=point, worker=number) for number, point in pairs)
        case "kill while it forms":
            points: tuple[Point, ...] = (first, "form")
            return tuple(
                Fault(what="kill", point=point, worker=number)
                for number, point in zip(victims, points, strict=False)
            )
        case "kill a newcomer":
            return (Fault(what="kill", point=draw.join_point, worker=newcomer),)
        case "delay":
            return (Fault(what="delay", point=first, worker=victims[0], seconds=draw.seconds),)
        case "short freeze":
            return (Fault(what="freeze", point=first, worker=victims[0], seconds=draw.seconds),)
        case "freeze":
            return (Fault(what="freeze", point=first, worker=victims[0]),)
        case "cut":
            return (Fault(what="cut", point=first, worker=victims[0]),)
        case _:
            return ()


def _ranks(status: Status, numbers: Collection[int]) -> set[int]:
    return {
        one.rank for one in status.workers if one.rank is not None and number_of(one.incarnation) in numbers
    }
