"""Runs one stage through one step: asks the schedule what comes next, does it, sends the result, or waits.

The decision is ``varuna.plan.next_task``, the same function that every simulation calls; the work is a
``StageProgram``; the neighbours are ``StageChannels``. Nothing here knows about models or optimizers.

Errors: what ``program`` raises becomes ``WorkerFailed`` naming operation, micro-batch, step and place (those of
Varuna itself keep their type and get the place as a note); a broken neighbour is ``PeerLost``, naming what was
awaited; a message of another generation, step, micro-batch or operation is ``ProtocolError``. After any of them
the caller must ``close`` or ``abort`` the channels, so that the neighbours hear of it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeVar

from varuna.errors import VarunaError, WorkerFailed
from varuna.failure import FailurePlace, mark_place
from varuna.plan import StageSchedule, StageState, next_task
from varuna.plan.simulate import TaskSpan
from varuna.run.busy import BusyTime
from varuna.run.channel import StageChannels
from varuna.run.neighbours import Neighbours, StepContext
from varuna.run.wire import Direction, Message
from varuna.spec import Task, TaskKind

__all__ = [
    "Message",
    "StageProgram",
    "StageTrace",
    "StepContext",
    "run_forward_only",
    "run_stage",
]

MAX_UNSENT = 4
"""Messages that a forward-only pass may leave unsent before it waits; nothing else bounds how far it runs."""

_T = TypeVar("_T")


class StageProgram(Protocol):
    """The work of one stage. ``micro_batch_index`` is k in the global batch, the same on every stage."""

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        """Run forward on what the previous stage sent (None on the first stage).

        Args:
            micro_batch_index: k in the global batch.
            received: activations in CPU memory, owned by the callee; None on the first stage.
            save_activations: keep what backward needs; if False, ``recompute`` comes before ``backward``
                (training), or there is no backward (evaluation).

        Returns:
            Activations for the next stage; None on the last stage.
        """

    def recompute(self, micro_batch_index: int) -> None:
        """Run forward again, this time keeping what backward needs."""

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool
    ) -> Message | None:
        """Run backward on the gradients of what forward sent (None on the last stage).

        Args:
            micro_batch_index: k in the global batch.
            gradients: in CPU memory, owned by the callee; None on the last stage.
            is_final: the last backward of this stage in this step; unless split, gradients are complete then.
            split: gradients of inputs only; ``weight_gradients`` comes later.

        Returns:
            Gradients of what forward received; None on the first stage.
        """

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        """Run what a split backward put off; gradients are complete after the one that ``is_final``."""


@dataclass(frozen=True, kw_only=True)
class StageTrace:
    """What a stage did and when.

    Attributes:
        started_s: ``time.monotonic()`` at the start of the step.
        spans: tasks in the order in which they ran, in seconds from ``started_s``.
    """

    started_s: float
    spans: tuple[TaskSpan, ...]


def run_stage(
    program: StageProgram,
    schedule: StageSchedule,
    channels: StageChannels | None,
    *,
    context: StepContext,
    record_trace: bool = False,
    busy: BusyTime | None = None,
) -> StageTrace | None:
    """Run every task of ``schedule``; ``channels`` is None for a pipeline of one stage.

    Args:
        program: the stage's work.
        schedule: its order.
        channels: to its neighbours.
        context: the step.
        record_trace: whether to note when each task ran.
        busy: gets the time that tasks take.

    Returns:
        The trace if ``record_trace``, else None. Messages may still be on their way out when it returns.
    """
    neighbours = Neighbours(
        channels,
        context,
        num_micro_batches=schedule.num_micro_batches,
        is_first=schedule.is_first,
        is_last=schedule.is_last,
    )
    state = StageState(schedule)
    started_s = time.monotonic()
    spans: list[TaskSpan] = []
    while not state.is_done:
        version = neighbours.check()
        if not schedule.is_first:
            state.activations_arrived = neighbours.num_arrived(Direction.ACTIVATION)
        if not schedule.is_last:
            state.gradients_arrived = neighbours.num_arrived(Direction.GRADIENT)
        task = next_task(state)
        if task is None:
            neighbours.wait(version, forwards_done=state.forwards_done, backwards_done=state.backwards_done)
            continue
        start_s = time.monotonic()
        if busy is not None:
            busy.begin()
        _run_task(program, schedule, neighbours, task)
        if busy is not None:
            busy.end()
        state.finish(task)
        if record_trace:
            end_s = time.monotonic()
            spans.append(TaskSpan(task=task, start_s=start_s - started_s, end_s=end_s - started_s))
    return StageTrace(started_s=started_s, spans=tuple(spans)) if record_trace else None


def run_forward_only(
    program: StageProgram,
    channels: StageChannels | None,
    *,
    context: StepContext,
    num_stages: int,
    stage_index: int,
    num_micro_batches: int,
) -> None:
    """Run the forward of every micro-batch in order: evaluation.

    A stage waits while more than ``MAX_UNSENT`` of its messages are unsent.
    """
    neighbours = Neighbours(
        channels,
        context,
        num_micro_batches=num_micro_batches,
        is_first=stage_index == 0,
        is_last=stage_index == num_stages - 1,
    )
    for index in range(num_micro_batches):
        while True:
            version = neighbours.check()
            if neighbours.num_arrived(Direction.ACTIVATION) > index:
                break
            neighbours.wait(version, forwards_done=index, backwards_done=index)
        _forward(program, neighbours, index, save_activations=False)
        neighbours.wait_unsent(Direction.ACTIVATION, MAX_UNSENT)


def _run_task(program: StageProgram, schedule: StageSchedule, neighbours: Neighbours, task: Task) -> None:
    index = task.micro_batch_index
    k = neighbours.context.first_micro_batch + index
    is_final = index == schedule.num_micro_batches - 1
    if task.kind is TaskKind.FORWARD:
        _forward(program, neighbours, index, save_activations=not schedule.recompute)
    elif task.kind is TaskKind.RECOMPUTE:
        _call(neighbours.context, "recompute", k, lambda: program.recompute(k))
    elif task.kind is TaskKind.WEIGHT:
        _call(
            neighbours.context,
            "weight gradients",
            k,
            lambda: program.weight_gradients(k, is_final=is_final),
        )
    else:
        gradients = neighbours.receive(Direction.GRADIENT, k)
        result = _call(
            neighbours.context,
            "backward",
            k,
            lambda: program.backward(k, gradients, is_final=is_final, split=schedule.split),
        )
        neighbours.send(Direction.GRADIENT, k, result)


def _forward(program: StageProgram, neighbours: Neighbours, index: int, *, save_activations: bool) -> None:
    k = neighbours.context.first_micro_batch + index
    received = neighbours.receive(Direction.ACTIVATION, k)
    result = _call(
        neighbours.context,
        "forward",
        k,
        lambda: program.forward(k, received, save_activations=save_activations),
    )
    neighbours.send(Direction.ACTIVATION, k, result)


def _call(context: StepContext, operation: str, micro_batch_index: int, work: Callable[[], _T]) -> _T:
    """Run user code; say where it failed if it fails."""
    try:
        return work()
    except (VarunaError, SystemExit) as error:
        mark_place(error, _failure_place(context, operation, micro_batch_index))
        raise
    except Exception as error:
        failure = WorkerFailed(
            f"{type(error).__name__} in {operation} of micro-batch {micro_batch_index}, "
            f"step {context.step_index} ({context.operation}), on {context.place}: {error}"
        )
        mark_place(failure, _failure_place(context, operation, micro_batch_index))
        raise failure from error


def _failure_place(context: StepContext, operation: str, micro_batch_index: int) -> FailurePlace:
    return FailurePlace(
        step_index=context.step_index,
        pipeline_index=context.pipeline_index,
        stage_index=context.stage_index,
        micro_batch_index=micro_batch_index,
        operation=operation,
    )
