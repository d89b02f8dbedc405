"""What workers did when, simulated or real: the values that timelines and traces are drawn from.

A task is named as in schedules (``F12``, ``B3``); the rest of a step has the names below, in a simulated trace
as in a real one.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from varuna.plan.simulate import TaskSpan
from varuna.spec import StagePosition, Task, TaskKind

REDUCE = "reduce"
"""From the end of the last task until this worker's gradients and buffers are summed: what is exposed of it."""

COMMIT = "commit"
"""The one all-reduce over all workers; waiting for slower ones is part of it."""

UPDATE = "update"
"""The optimizer."""

_TASK_NAME = re.compile(r"([FRBW])(\d+)")


@dataclass(frozen=True, kw_only=True)
class Span:
    """A named stretch of time, in seconds from the start of the step."""

    name: str
    start_s: float
    end_s: float

    @property
    def task(self) -> Task | None:
        """The task it is named after; None for reduce, commit, update."""
        match = _TASK_NAME.fullmatch(self.name)
        return None if match is None else Task(TaskKind(match[1]), int(match[2]))


@dataclass(frozen=True, kw_only=True)
class StepSpans:
    """What one worker did in one step.

    Attributes:
        step_index: the step.
        started_s: when it began on this worker, on the trace's clock (a worker's own: ``time.monotonic()``).
        tasks: in the order in which they ran, in seconds from ``started_s``; empty for a spare.
        others: reduce, commit, update, likewise.
    """

    step_index: int
    started_s: float
    tasks: tuple[TaskSpan, ...] = ()
    others: tuple[Span, ...] = ()

    def all_spans(self, later_s: float = 0.0) -> tuple[Span, ...]:
        """Tasks, by name, and then the others; all moved by ``later_s``."""
        tasks = [Span(name=str(span.task), start_s=span.start_s, end_s=span.end_s) for span in self.tasks]
        return tuple(
            Span(name=span.name, start_s=span.start_s + later_s, end_s=span.end_s + later_s)
            for span in (*tasks, *self.others)
        )


@dataclass(frozen=True, kw_only=True)
class WorkerTrace:
    """Steps of one worker.

    Attributes:
        worker_index: the worker.
        position: where it stands in the plan; None for a spare.
        steps: in order.
    """

    worker_index: int
    position: StagePosition | None
    steps: tuple[StepSpans, ...]
