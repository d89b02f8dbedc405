"""Schedules: in which order a stage runs the tasks of its micro-batches.

Every schedule runs forwards in ascending order of micro-batch, and backwards too, so that the channels between
neighbours are first-in-first-out with nothing to sort, and counts say what has arrived.

- ``gpipe``: all forwards, then all backwards. Holds all N micro-batches in flight.
- ``1f1b``: P - stage_index forwards, then one backward and one forward in turn. Holds P - stage_index.
- ``varuna``: no fixed order but a rule over what has arrived (``decide.py``), so that a late message costs only
  what no other micro-batch can fill. Holds at most ``max_in_flight``.
- ``zero-bubble``: the same rule, with backward split in two: gradients of inputs, which the stage before waits
  for, and gradients of weights, which nobody waits for and which fill what would be idle. Holds at most
  ``max_held`` sets of activations. After "Zero Bubble Pipeline Parallelism" (Qi et al., ICLR 2024), whose
  schedules are orders made beforehand.

A stage recomputes if its flag says so, except where each backward directly follows its forward and dropping
activations saves nothing: only the last stage of ``gpipe`` recomputes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from varuna.errors import PlanError
from varuna.plan.decide import BACKWARD, FORWARD, RECOMPUTE, WEIGHT, decide
from varuna.spec import Task, TaskKind

SCHEDULES = ("varuna", "1f1b", "gpipe", "zero-bubble")

TASK_KINDS = (None, TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.WEIGHT)
"""Kinds by the number that ``decide`` returns; None: wait."""


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
        split: backwards are the gradients of inputs only; weight tasks do the rest.
        max_held: where ``split``, at no time are more sets of activations in memory: a set is there from
            forward (or recompute) to the end of the weight task. Elsewhere 0.
        warm_up: forwards before the first backward of a strict order; 0 for a rule over what has arrived.
    """

    name: str
    num_stages: int
    stage_index: int
    num_micro_batches: int
    recompute: bool
    max_in_flight: int
    split: bool = False
    max_held: int = 0
    warm_up: int = 0

    @property
    def opportunistic(self) -> bool:
        """``next_task`` decides from what has arrived; otherwise it keeps ``order``."""
        return self.warm_up == 0

    @property
    def order(self) -> tuple[Task, ...]:
        """Every task once, in the order in which a strict schedule runs them; empty where opportunistic."""
        return () if self.opportunistic else tuple(_strict_order(self))

    @property
    def num_tasks(self) -> int:
        """Tasks of one step."""
        return self.num_micro_batches * (2 + self.recompute + self.split)

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
        """With fewer than this in flight, an opportunistic stage runs a forward even before a backward.

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
            own. With ``zero-bubble`` also the most sets of activations.

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
    split = name == "zero-bubble"
    is_strict = name in ("1f1b", "gpipe")
    if is_strict:
        limit = num_micro_batches if name == "gpipe" else min(num_micro_batches, num_stages - stage_index)
        if 0 < max_in_flight < limit:
            raise PlanError(
                f"Schedule {name!r} has a fixed order with {limit} micro-batches in flight on stage "
                f"{stage_index}, but max_in_flight={max_in_flight}. Use schedule 'varuna', which keeps any "
                f"limit, or raise it."
            )
    else:
        default = default_max_in_flight(num_stages, stage_index)
        limit = min(num_micro_batches, default if is_last else max_in_flight or default)
    held = 0
    if split:
        short_of_memory = bool(recompute[stage_index]) or (is_last and any(recompute))
        held = default_max_held(num_stages, stage_index, recompute=short_of_memory)
        held = min(held, num_micro_batches, max_in_flight or held)
    return StageSchedule(
        name=name,
        num_stages=num_stages,
        stage_index=stage_index,
        num_micro_batches=num_micro_batches,
        recompute=bool(recompute[stage_index]) and not (is_last and name != "gpipe"),
        max_in_flight=limit,
        split=split,
        max_held=held,
        warm_up=limit if is_strict else 0,
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


def default_max_held(num_stages: int, stage_index: int, *, recompute: bool) -> int:
    """The limit of a ``zero-bubble`` stage: sets of activations in memory, in flight or kept for weights.

    P + P / 2 + 2 of them are as fast as any number; P, what the first stage of ``1f1b`` has, cost up to a tenth
    of the time. Where activations are recomputed memory is short: at most 4. Figures are in
    docs/concepts/plan.md.
    """
    return min(stage_index + 2, 4) if recompute else num_stages + num_stages // 2 + 2


def _strict_order(schedule: StageSchedule) -> Iterator[Task]:
    """What ``decide`` says when everything has arrived."""
    total = schedule.num_micro_batches
    done = [0, 0, 0, 0, 0]
    while True:
        code = decide(
            done[FORWARD], done[RECOMPUTE], done[BACKWARD], done[WEIGHT],
            total, total, total, schedule.warm_up, 0, 0, 0, schedule.recompute, schedule.split,
        )  # fmt: skip
        kind = TASK_KINDS[code]
        if kind is None:
            return
        yield Task(kind, done[code])
        done[code] += 1


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
