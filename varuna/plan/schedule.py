"""Schedules: in which order a stage runs the forwards, recomputes and backwards of its micro-batches.

Every schedule runs forwards in ascending order of micro-batch, and backwards too, so the activation and gradient
channels between neighbours are first-in-first-out with nothing to sort and counts say what has arrived.

- ``gpipe``: all forwards, then all backwards. Needs memory for all N micro-batches.
- ``1f1b``: P - stage_index forwards, then one backward and one forward in turn. At most P - stage_index in flight.
- ``varuna``: a backward as soon as its gradient is here; its recompute just early enough to be ready by then; a
  forward otherwise, up to ``max_in_flight``. Not a fixed order but a rule (``state.next_task``), so a late message
  costs only what no other micro-batch can fill (after "Varuna: Scalable, Low-cost Training of Massive Deep Learning
  Models", EuroSys'22, section 3.2).

A recompute follows its stage's flag, except where the backward directly follows its forward and nothing is there to
save: the last stage of ``1f1b`` and ``varuna`` keeps its activations.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property

from varuna.errors import PlanError
from varuna.plan.unit_time import varuna_order
from varuna.spec import Task, TaskKind

SCHEDULES = ("varuna", "1f1b", "gpipe")

ALLOWANCE = 6
"""Micro-batches that a ``varuna`` stage may hold beyond the P - stage_index that free communication needs.

They are what covers late messages. Measured by simulation in docs/concepts/plan.md.
"""

ALLOWANCE_WITH_RECOMPUTE = 12
"""The same where a stage recomputes: a micro-batch in flight is then only the input of the stage."""


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """What one stage does in one step.

    Attributes:
        name: one of ``SCHEDULES``.
        num_stages, stage_index: P, and which of them.
        num_micro_batches: micro-batches of this pipeline in one step.
        recompute: activations are dropped after every forward here and computed again before the backward. What the
            engine must obey: it may be False although the plan asks for recompute (see the module's text).
        max_in_flight: at no time are more micro-batches between forward and backward here.
        opportunistic: ``order`` is what happens when all tasks take their nominal time and messages take none; at
            run time a task that can run goes before one whose input has not arrived. Otherwise ``order`` is strict.
        order: every task once.
    """

    name: str
    num_stages: int
    stage_index: int
    num_micro_batches: int
    recompute: bool
    max_in_flight: int
    opportunistic: bool
    order: tuple[Task, ...]

    @property
    def is_first(self) -> bool:
        """Its activations are the batch itself: here from the start."""
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        """Its gradient starts from its own loss: here when its forward (or recompute) is done."""
        return self.stage_index == self.num_stages - 1

    @cached_property
    def forwards_before_recompute(self) -> tuple[int, ...]:
        """Per micro-batch, how many forwards ``order`` runs before its recompute; empty without recompute."""
        counts = []
        num_forwards = 0
        for task in self.order:
            if task.kind is TaskKind.FORWARD:
                num_forwards += 1
            elif task.kind is TaskKind.RECOMPUTE:
                counts.append(num_forwards)
        return tuple(counts)


def stage_schedule(
    name: str,
    *,
    num_stages: int,
    stage_index: int,
    num_micro_batches: int,
    recompute: Sequence[bool],
    max_in_flight: int = 0,
) -> StageSchedule:
    """The schedule of one stage.

    Args:
        name: one of ``SCHEDULES``.
        num_stages: P.
        stage_index: the stage, from 0.
        num_micro_batches: micro-batches of the pipeline in one step, at least 1.
        recompute: per stage, whether the plan lets it recompute.
        max_in_flight: the most micro-batches between forward and backward on this stage; 0 is the schedule's default.

    Raises:
        PlanError: unknown name, numbers that do not fit each other, or ``max_in_flight`` below what a fixed order needs.
    """
    _check(name, num_stages, stage_index, num_micro_batches, recompute, max_in_flight)
    is_last = stage_index == num_stages - 1
    recomputes = recompute[stage_index] and not (is_last and name != "gpipe")
    if name == "varuna":
        mask = (*(bool(flag) for flag in recompute[:-1]), False)
        limits = [default_max_in_flight(num_stages, stage, mask[stage]) for stage in range(num_stages)]
        limits[stage_index] = max_in_flight or limits[stage_index]
        limits = [min(limit, num_micro_batches) for limit in limits]
        limit = limits[stage_index]
        order = varuna_order(num_micro_batches, mask, tuple(limits))[stage_index]
    else:
        limit = num_micro_batches if name == "gpipe" else min(num_micro_batches, num_stages - stage_index)
        if 0 < max_in_flight < limit:
            raise PlanError(
                f"Schedule {name!r} has a fixed order that holds {limit} micro-batches in flight on stage {stage_index}, "
                f"but max_in_flight={max_in_flight}. Use schedule 'varuna', which keeps any limit, or raise the limit."
            )
        order = tuple(_fixed_order(num_micro_batches, limit, recomputes))
    return StageSchedule(
        name=name,
        num_stages=num_stages,
        stage_index=stage_index,
        num_micro_batches=num_micro_batches,
        recompute=recomputes,
        max_in_flight=limit,
        opportunistic=name == "varuna",
        order=order,
    )


def pipeline_schedules(
    name: str, *, num_stages: int, num_micro_batches: int, recompute: Sequence[bool], max_in_flight: int = 0
) -> tuple[StageSchedule, ...]:
    """``stage_schedule`` of every stage of a pipeline, in order; ``max_in_flight`` holds for each."""
    return tuple(
        stage_schedule(
            name,
            num_stages=num_stages,
            stage_index=stage_index,
            num_micro_batches=num_micro_batches,
            recompute=recompute,
            max_in_flight=max_in_flight,
        )
        for stage_index in range(num_stages)
    )


def default_max_in_flight(num_stages: int, stage_index: int, recompute: bool) -> int:
    """The limit of a ``varuna`` stage: what free communication needs, and an allowance for late messages.

    The last stage runs each backward right after its forward and never holds more than one.
    """
    if stage_index == num_stages - 1:
        return 1
    return num_stages - stage_index + (ALLOWANCE_WITH_RECOMPUTE if recompute else ALLOWANCE)


def _fixed_order(num_micro_batches: int, num_warm_up: int, recompute: bool) -> Iterator[Task]:
    """``num_warm_up`` forwards, then a backward and a forward in turn; all forwards first is the case of N."""
    for index in range(num_warm_up):
        yield Task(TaskKind.FORWARD, index)
    for index in range(num_micro_batches):
        if recompute:
            yield Task(TaskKind.RECOMPUTE, index)
        yield Task(TaskKind.BACKWARD, index)
        if index + num_warm_up < num_micro_batches:
            yield Task(TaskKind.FORWARD, index + num_warm_up)


def check_schedule_name(name: str) -> None:
    """Raise ``PlanError`` unless ``name`` is one of ``SCHEDULES``."""
    if name not in SCHEDULES:
        raise PlanError(f"Unknown schedule {name!r}. Known schedules: {', '.join(SCHEDULES)}.")


def _check(
    name: str,
    num_stages: int,
    stage_index: int,
    num_micro_batches: int,
    recompute: Sequence[bool],
    max_in_flight: int,
) -> None:
    check_schedule_name(name)
    if num_stages < 1 or not 0 <= stage_index < num_stages:
        raise PlanError(
            f"Stage {stage_index} is not one of {num_stages} stages: indices are 0 to num_stages - 1."
        )
    if num_micro_batches < 1:
        raise PlanError(f"num_micro_batches={num_micro_batches} must be at least 1. Use fewer pipelines.")
    if len(recompute) != num_stages:
        raise PlanError(
            f"recompute has {len(recompute)} entries for {num_stages} stages. Give one True or False for each stage."
        )
    if max_in_flight < 0:
        raise PlanError(f"max_in_flight={max_in_flight} must be at least 1, or 0 for the schedule's default.")
