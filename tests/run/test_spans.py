"""The recorder: who is asked, what they are told, and that nothing is kept when nobody wants it."""

from __future__ import annotations

import pytest

from tests.observe.support import task_span
from varuna.plan.spans import StepSpans
from varuna.run.engine import StageTrace
from varuna.run.spans import SpanRecorder


class Wants:
    def __init__(self, *steps: int) -> None:
        self.steps = steps
        self.told: list[StepSpans] = []

    def wants(self, step_index: int) -> bool:
        return step_index in self.steps

    def record(self, step_index: int, spans: StepSpans) -> None:
        assert step_index == spans.step_index
        self.told.append(spans)


def run(recorder: SpanRecorder, step_index: int) -> bool:
    with recorder.step(step_index):
        recording = recorder.is_recording
        if recording:
            recorder.add_tasks(StageTrace(started_s=1e9, spans=(task_span("F0", 0.5, 1.0),)))
        with recorder.span("reduce"):
            pass
    assert not recorder.is_recording
    return recording


def test_listeners_get_the_steps_they_want_and_nobody_else_does() -> None:
    recorder, one, two = SpanRecorder(), Wants(1), Wants(1, 3)
    assert not run(recorder, 0)
    recorder.subscribe(one)
    recorder.subscribe(two)
    assert [run(recorder, index) for index in range(5)] == [False, True, False, True, False]
    assert [spans.step_index for spans in one.told] == [1]
    assert [spans.step_index for spans in two.told] == [1, 3]
    spans = two.told[1]
    assert [span.name for span in spans.others] == ["reduce"]
    assert spans.tasks[0].start_s + spans.started_s == pytest.approx(1e9 + 0.5)  # moved to the step's own start


def test_a_failed_step_is_not_told_and_leaves_nothing_behind() -> None:
    recorder, listener = SpanRecorder(), Wants(0, 1)
    recorder.subscribe(listener)
    with pytest.raises(KeyError), recorder.step(0), recorder.span("reduce"):
        raise KeyError
    run(recorder, 1)
    assert [(spans.step_index, len(spans.others)) for spans in listener.told] == [(1, 1)]
