"""What workers did when, simulated or real: the values that timelines and traces are drawn from.

A task is named as in schedules (``F12``, ``B3``); the rest of a step has the names below, in a simulated trace
as in a real one.
"""

from __future__ import annotations

from dataclasses import dataclass

from varuna.plan.simulate import TaskSpan
from varuna.spec import StagePosition

REDUCE = "reduce"
"""From the end of the last task until this worker's gradients and buffers are summed: what is exposed of it."""

COMMIT = "commit"
"""The one all-reduce over all workers; waiting for slower ones is part of it."""

UPDATE = "update"
"""The optimizer."""


@dataclass(frozen=True, kw_only=True)
class Span:
    """Something other than a task, in seconds from the start of the step."""

    name: str
    start_s: float
    end_s: float


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
