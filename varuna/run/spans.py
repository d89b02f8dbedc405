"""Who wants to know what this worker does when, and how they are told.

One ``SpanRecorder`` per job. Whoever wants spans subscribes a listener (a trace file, the refinement of a
profile); it is asked before each step and told after it. If nobody wants a step, nothing is recorded and no
clock is read.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from typing import Protocol

from varuna.plan.simulate import TaskSpan
from varuna.plan.spans import Span, StepSpans
from varuna.run.engine import StageTrace


class SpanListener(Protocol):
    """Somebody who wants spans. Called in the training thread, outside the measured spans."""

    def wants(self, step_index: int) -> bool:
        """Whether this step is to be recorded; asked before it."""

    def record(self, step_index: int, spans: StepSpans) -> None:
        """What this worker did in a step that was wanted, after its update. A failed step is not told."""


class SpanRecorder:
    """Spans of one worker, step by step; not for use from several threads."""

    def __init__(self) -> None:
        self._listeners: list[SpanListener] = []
        self._wanted_by: list[SpanListener] = []
        self._started_s = 0.0
        self._tasks: list[TaskSpan] = []
        self._others: list[Span] = []

    def subscribe(self, listener: SpanListener) -> None:
        """Ask ``listener`` before every later step."""
        self._listeners.append(listener)

    @property
    def is_recording(self) -> bool:
        """Whether somebody wants the step that is under way; pass it on as ``record_trace``."""
        return bool(self._wanted_by)

    @contextlib.contextmanager
    def step(self, step_index: int) -> Iterator[None]:
        """Around one whole step: forward to update."""
        self._wanted_by = [listener for listener in self._listeners if listener.wants(step_index)]
        self._tasks, self._others = [], []
        self._started_s = time.monotonic() if self._wanted_by else 0.0
        wanted_by = self._wanted_by
        try:
            yield
        finally:
            self._wanted_by = []
        if wanted_by:
            spans = StepSpans(
                step_index=step_index,
                started_s=self._started_s,
                tasks=tuple(self._tasks),
                others=tuple(self._others),
            )
            for listener in wanted_by:
                listener.record(step_index, spans)

    def add_tasks(self, trace: StageTrace | None) -> None:
        """What ``run_stage`` returned."""
        if trace is None or not self.is_recording:
            return
        later_s = trace.started_s - self._started_s
        self._tasks += [
            TaskSpan(task=span.task, start_s=span.start_s + later_s, end_s=span.end_s + later_s)
            for span in trace.spans
        ]

    @contextlib.contextmanager
    def span(self, name: str) -> Iterator[None]:
        """Around a part of the step that is no task: ``reduce``, ``commit``, ``update``."""
        if not self.is_recording:
            yield
            return
        start_s = time.monotonic() - self._started_s
        yield
        self._others.append(Span(name=name, start_s=start_s, end_s=time.monotonic() - self._started_s))
