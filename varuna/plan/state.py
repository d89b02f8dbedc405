"""Progress of a stage: counts of what is done and what has arrived, and the next task by the rule over them.

The rule is ``decide.py``, which simulations compile. Nothing here keeps a clock or does input or output.
"""

from __future__ import annotations

from varuna.plan.decide import decide
from varuna.plan.schedule import TASK_KINDS, StageSchedule
from varuna.spec import Task, TaskKind

_PLURALS = {
    TaskKind.FORWARD: "forwards",
    TaskKind.RECOMPUTE: "recomputes",
    TaskKind.BACKWARD: "backwards",
    TaskKind.WEIGHT: "weight tasks",
}


class StageState:
    """Progress of one stage within one step. Not shared between threads without the caller's lock.

    Attributes:
        schedule: what is being run.
        activations_arrived: micro-batches whose input is here; all of them from the start on the first stage.
        gradients_arrived: micro-batches whose gradient from the next stage is here; not used on the last stage.
        forwards_done, recomputes_done, backwards_done, weights_done: each kind runs in ascending order, so
            counts say which.
    """

    __slots__ = (
        "activations_arrived",
        "backwards_done",
        "forwards_done",
        "gradients_arrived",
        "recomputes_done",
        "schedule",
        "weights_done",
    )

    def __init__(self, schedule: StageSchedule) -> None:
        self.schedule = schedule
        self.activations_arrived = schedule.num_micro_batches if schedule.is_first else 0
        self.gradients_arrived = 0
        self.forwards_done = 0
        self.recomputes_done = 0
        self.backwards_done = 0
        self.weights_done = 0

    @property
    def is_done(self) -> bool:
        """Every task has been run."""
        schedule = self.schedule
        last = self.weights_done if schedule.split else self.backwards_done
        return last == schedule.num_micro_batches

    @property
    def num_in_flight(self) -> int:
        """Micro-batches between forward and backward: their stashed inputs or activations are in memory."""
        return self.forwards_done - self.backwards_done

    @property
    def num_recomputed(self) -> int:
        """Micro-batches between recompute and backward."""
        return max(0, self.recomputes_done - self.backwards_done)

    @property
    def num_held(self) -> int:
        """Sets of activations in memory: from forward (or recompute) to the end of all parts of backward."""
        schedule = self.schedule
        made = self.recomputes_done if schedule.recompute else self.forwards_done
        return made - (self.weights_done if schedule.split else self.backwards_done)

    def num_done(self, kind: TaskKind) -> int:
        """Tasks of a kind that are done: the index of the next one."""
        if kind is TaskKind.FORWARD:
            return self.forwards_done
        if kind is TaskKind.BACKWARD:
            return self.backwards_done
        return self.recomputes_done if kind is TaskKind.RECOMPUTE else self.weights_done

    def finish(self, task: Task) -> None:
        """Record that a task, the next one of its kind, has been run."""
        kind, index = task.kind, task.micro_batch_index
        done = self.num_done(kind)
        assert index == done, f"{task} after {done} {_PLURALS[kind]}"
        if kind is TaskKind.FORWARD:
            self.forwards_done = index + 1
        elif kind is TaskKind.BACKWARD:
            self.backwards_done = index + 1
        elif kind is TaskKind.RECOMPUTE:
            self.recomputes_done = index + 1
        else:
            self.weights_done = index + 1

    def __repr__(self) -> str:
        schedule = self.schedule
        return (
            f"StageState({schedule.name}, stage {schedule.stage_index} of {schedule.num_stages}, "
            f"N={schedule.num_micro_batches}, done F={self.forwards_done} R={self.recomputes_done} "
            f"B={self.backwards_done} W={self.weights_done}, arrived activations={self.activations_arrived} "
            f"gradients={self.gradients_arrived})"
        )


def next_task(state: StageState) -> Task | None:
    """The task to run now, or None: wait for an arrival (if ``is_done``: stop). Constant time, no effects."""
    schedule = state.schedule
    code = decide(
        state.forwards_done,
        state.recomputes_done,
        state.backwards_done,
        state.weights_done,
        state.activations_arrived,
        state.forwards_done if schedule.is_last else state.gradients_arrived,
        schedule.num_micro_batches,
        schedule.warm_up,
        schedule.low_in_flight,
        schedule.max_in_flight,
        schedule.max_held,
        schedule.recompute,
        schedule.split,
    )
    kind = TASK_KINDS[code]
    return None if kind is None else Task(kind, state.num_done(kind))
