"""What a stage does next: the one decision that the engine and every simulation share.

``StageState`` counts what has been done and what has arrived; ``next_task`` looks at it and decides. It keeps
no clock and does no input or output.

Why no ``varuna`` stage waits for ever, whatever arrives when: let k be the earliest micro-batch that is not
finished on every stage. No stage holds an earlier one, so the in-flight limit leaves room for k's forward
everywhere, and the one recomputed set is k's or nobody's. Whenever k's next task has its input on a stage,
``next_task`` returns some task there, and there are finitely many others before k's is the only one left. So
k's forward reaches the last stage, and its backward the first.
"""

from __future__ import annotations

from varuna.plan.schedule import StageSchedule
from varuna.spec import Task, TaskKind


class StageState:
    """Progress of one stage within one step. Not shared between threads without the caller's lock.

    Attributes:
        schedule: what is being run.
        activations_arrived: micro-batches whose input is here; all of them from the start on the first stage.
        gradients_arrived: micro-batches whose gradient from the next stage is here; not used on the last stage.
        forwards_done, recomputes_done, backwards_done: each kind runs in ascending order, so counts say which.
    """

    __slots__ = (
        "activations_arrived",
        "backwards_done",
        "forwards_done",
        "gradients_arrived",
        "recomputes_done",
        "schedule",
    )

    def __init__(self, schedule: StageSchedule) -> None:
        self.schedule = schedule
        self.activations_arrived = schedule.num_micro_batches if schedule.is_first else 0
        self.gradients_arrived = 0
        self.forwards_done = 0
        self.recomputes_done = 0
        self.backwards_done = 0

    @property
    def is_done(self) -> bool:
        """Every backward has been run."""
        return self.backwards_done == self.schedule.num_micro_batches

    @property
    def num_in_flight(self) -> int:
        """Micro-batches between forward and backward: their stashed inputs or activations are in memory."""
        return self.forwards_done - self.backwards_done

    @property
    def num_recomputed(self) -> int:
        """Micro-batches between recompute and backward."""
        return max(0, self.recomputes_done - self.backwards_done)

    def finish(self, task: Task) -> None:
        """Record that a task, the next one of its kind, has been run."""
        index = task.micro_batch_index
        if task.kind is TaskKind.FORWARD:
            assert index == self.forwards_done, f"{task} after {self.forwards_done} forwards"
            self.forwards_done = index + 1
        elif task.kind is TaskKind.BACKWARD:
            assert index == self.backwards_done, f"{task} after {self.backwards_done} backwards"
            self.backwards_done = index + 1
        else:
            assert index == self.recomputes_done, f"{task} after {self.recomputes_done} recomputes"
            self.recomputes_done = index + 1

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"StageState({schedule.name}, stage {schedule.stage_index} of {schedule.num_stages}, "
            f"N={schedule.num_micro_batches}, done F={self.forwards_done} R={self.recomputes_done} "
            f"B={self.backwards_done}, arrived activations={self.activations_arrived} "
            f"gradients={self.gradients_arrived})"
        )


def next_task(state: StageState) -> Task | None:
    """The task to run now, or None: wait for an arrival (if ``is_done``: stop). Constant time, no effects."""
    if state.schedule.opportunistic:
        return _next_opportunistic(state)
    return _next_in_order(state)


def _next_in_order(state: StageState) -> Task | None:
    """The next task of the strict order if its input is here."""
    schedule = state.schedule
    position = state.forwards_done + state.recomputes_done + state.backwards_done
    if position == len(schedule.order):
        return None
    task = schedule.order[position]
    if task.kind is TaskKind.FORWARD and task.micro_batch_index >= state.activations_arrived:
        return None
    if (
        task.kind is TaskKind.BACKWARD
        and task.micro_batch_index >= state.gradients_arrived
        and not schedule.is_last
    ):
        return None
    return task


def _next_opportunistic(state: StageState) -> Task | None:
    """The ``varuna`` rule: the first of these that can run.

    1. A forward, while fewer than ``low_in_flight`` are in flight: later stages must not starve.
    2. The next backward if its gradient is here, its recompute first.
    3. A forward, up to ``max_in_flight``.
    4. The next backward's recompute, ahead of its gradient; one set of recomputed activations at a time.
    """
    schedule = state.schedule
    forwards, backwards = state.forwards_done, state.backwards_done
    in_flight = forwards - backwards
    can_forward = in_flight < schedule.max_in_flight and forwards < state.activations_arrived
    if can_forward and in_flight < schedule.low_in_flight:
        return Task(TaskKind.FORWARD, forwards)
    needs_recompute = schedule.recompute and in_flight > 0 and state.recomputes_done == backwards
    if in_flight > 0 and (schedule.is_last or state.gradients_arrived > backwards):
        return Task(TaskKind.RECOMPUTE if needs_recompute else TaskKind.BACKWARD, backwards)
    if can_forward:
        return Task(TaskKind.FORWARD, forwards)
    return Task(TaskKind.RECOMPUTE, backwards) if needs_recompute else None
