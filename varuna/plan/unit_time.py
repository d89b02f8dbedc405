"""The order of the ``varuna`` schedule when nothing is late: a simulation in whole units of time.

A forward takes 1, a recompute 1, a backward 2, a message nothing. A stage starts a recompute when its successor is half
through the backward that will send the gradient, so that both are ready at the same moment.
"""

from __future__ import annotations

from functools import lru_cache

from varuna.spec import Task, TaskKind

UNIT_TIMES = {TaskKind.FORWARD: 1, TaskKind.RECOMPUTE: 1, TaskKind.BACKWARD: 2}


class _Stage:
    """One stage of the simulation: tasks started so far, tasks finished so far, and what runs until when."""

    def __init__(self, recompute: bool, limit: int) -> None:
        self.recompute = recompute
        self.limit = limit
        self.order: list[Task] = []
        self.done = dict.fromkeys(TaskKind, 0)
        self.running: Task | None = None
        self.end = 0

    def finish(self, now: int) -> None:
        if self.running is not None and self.end == now:
            self.done[self.running.kind] += 1
            self.running = None

    def start(self, task: Task, now: int) -> None:
        self.order.append(task)
        self.running = task
        self.end = now + UNIT_TIMES[task.kind]

    def is_half_through(self, micro_batch_index: int, now: int) -> bool:
        """At least half through the backward of a micro-batch, or past it."""
        if self.done[TaskKind.BACKWARD] > micro_batch_index:
            return True
        backward = Task(TaskKind.BACKWARD, micro_batch_index)
        return self.running == backward and self.end - now <= UNIT_TIMES[TaskKind.BACKWARD] // 2


@lru_cache(maxsize=64)
def varuna_order(
    num_micro_batches: int, recompute: tuple[bool, ...], max_in_flight: tuple[int, ...]
) -> tuple[tuple[Task, ...], ...]:
    """The order of every stage, for recompute flags and limits per stage (the last stage must not recompute)."""
    assert not recompute[-1], "the last stage runs each backward right after its forward"
    stages = [_Stage(flag, limit) for flag, limit in zip(recompute, max_in_flight, strict=True)]
    now = 0
    while any(stage.done[TaskKind.BACKWARD] < num_micro_batches for stage in stages):
        for stage in stages:
            stage.finish(now)
        for index, stage in enumerate(stages):
            if stage.running is None:
                arrived = stages[index - 1].done[TaskKind.FORWARD] if index > 0 else num_micro_batches
                successor = stages[index + 1] if index + 1 < len(stages) else None
                task = _choose(stage, arrived, successor, now)
                if task is not None:
                    stage.start(task, now)
        now += 1
    return tuple(tuple(stage.order) for stage in stages)


def _choose(stage: _Stage, activations_arrived: int, successor: _Stage | None, now: int) -> Task | None:
    """What an idle stage starts: backward, else the recompute that is due, else a forward, else a recompute."""
    forwards, backwards = stage.done[TaskKind.FORWARD], stage.done[TaskKind.BACKWARD]
    in_flight = forwards - backwards
    needs_recompute = stage.recompute and in_flight > 0 and stage.done[TaskKind.RECOMPUTE] == backwards
    gradient_here = successor is None or successor.done[TaskKind.BACKWARD] > backwards
    if in_flight > 0 and gradient_here and not needs_recompute:
        return Task(TaskKind.BACKWARD, backwards)
    if needs_recompute and (successor is None or successor.is_half_through(backwards, now)):
        return Task(TaskKind.RECOMPUTE, backwards)
    if forwards < activations_arrived and in_flight < stage.limit:
        return Task(TaskKind.FORWARD, forwards)
    return Task(TaskKind.RECOMPUTE, backwards) if needs_recompute else None
