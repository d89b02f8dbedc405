"""Schedules: in which order a stage runs the forwards, recomputes and backwards of its micro-batches.

Every schedule runs forwards in ascending order of micro-batch, and backwards too, so that the channels between
neighbours are first-in-first-out with nothing to sort, and counts say what has arrived.

- ``gpipe``: all forwards, then all backwards. Holds all N micro-batches in flight.
- ``1f1b``: P - stage_index forwards, then one backward and one forward in turn. Holds P - stage_index.
- ``varuna``: no fixed order but a rule over what has arrived (``state.next_task``), so that a late message
  costs only what no other micro-batch can fill. Holds at most ``max_in_flight``.

A stage recomputes if its flag says so, except where each backward directly follows its forward and dropping
activations saves nothing: the last stage of ``1f1b`` and ``varuna`` keeps them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from varuna.errors import PlanError
from varuna.spec import Task, TaskKind

SCHEDULES = ("varuna", "1f1b", "gpipe")


@dataclass(frozen=True, kw_only=True)
class StageSchedule:
    """What one stage does in one step.

    Attributes:
        name: one of ``SCHEDULES``.
        num_stages, stage_index: P, and which of them.
        num_micro_batches: micro-batches of this pipeline in one step.
        recompute: activations are dropped after every forward here and computed again before the backward. The
            engine obeys this one, which may be False where the plan's flag is True (see the module's text).
        max_in_flight: at no time are more micro-batches between forward and backward here.
        opportunistic: ``next_task`` decides from what has arrived; otherwise it keeps ``order``.
        order: every task once, in the order in which they must run; empty where opportunistic.
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

    @property
    def low_in_flight(self) -> int:
        """With fewer than this in flight, a ``varuna`` stage runs a forward even before a backward.

        P - stage_index is what keeps all later stages at work when messages take no time; two more keep a stage
        that is slower than its successors from spending whole bursts on backwards alone while those starve.
        """
        return self.num_stages - self.stage_index + 2


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
        max_in_flight: the most micro-batches between forward and backward on this stage; 0 is the schedule's
        own.

    Raises:
        PlanError: unknown name, numbers that do not fit, or ``max_in_flight`` below what a fixed order needs.
    """
    _check(
        name,
        num_stages=num_stages,
        stage_index=stage_index,
        num_micro_batches=num_micro_batches,
        recompute=recompute,
        max_in_flight=max_in_flight,
    )
    is_last = stage_index == num_stages - 1
    recomputes = bool(recompute[stage_index]) and not (is_last and name != "gpipe")
    if name == "varuna":
        default = default_max_in_flight(num_stages, stage_index)
        limit = min(num_micro_batches, default if is_last else max_in_flight or default)
        order: tuple[Task, ...] = ()
    else:
        limit = num_micro_batches if name == "gpipe" else min(num_micro_batches, num_stages - stage_index)
        if 0 < max_in_flight < limit:
            raise PlanError(
                f"Schedule {name!r} has a fixed order with {limit} micro-batches in flight on stage "
                f"{stage_index}, but max_in_flight={max_in_flight}. Use schedule 'varuna', which keeps any "
                f"limit, or raise it."
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


def default_max_in_flight(num_stages: int, stage_index: int) -> int:
    """The limit of a ``varuna`` stage: twice the P - stage_index that free messages would need, and two.

    The second half covers late messages: the longer the way to the last stage and back, the more of them.
    Figures are in docs/concepts/plan.md. The last stage runs each backward right after its forward: one.
    """
    if stage_index == num_stages - 1:
        return 1
    return 2 * (num_stages - stage_index) + 2


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
    *,
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
            f"recompute has {len(recompute)} entries for {num_stages} stages. Give one True or False for each."
        )
    if max_in_flight < 0:
        raise PlanError(f"max_in_flight={max_in_flight} must be at least 1, or 0 for the schedule's default.")
