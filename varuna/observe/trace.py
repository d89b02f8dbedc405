"""Traces as files: the Trace Event Format of Chrome, as JSON, which https://ui.perfetto.dev opens.

A worker is a process with two threads, ``compute`` and ``communication``; every span is a complete event
(``"ph": "X"``, ``ts`` and ``dur`` in microseconds). Names and categories are the same for a simulated and a
real step, so both can be looked at side by side. Format: "Trace Event Format", the Chromium project,
https://docs.google.com/document/d/1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from varuna.errors import ConfigError
from varuna.observe.text import human_seconds
from varuna.plan.broken_json import explain_broken_json
from varuna.plan.simulate import TaskSpan
from varuna.plan.spans import UPDATE, Span, StepSpans, WorkerTrace
from varuna.spec import StagePosition, TaskKind

_TASK_CATEGORIES = {
    TaskKind.FORWARD: "forward",
    TaskKind.RECOMPUTE: "recompute",
    TaskKind.BACKWARD: "backward",
    TaskKind.WEIGHT: "weight",
}
_COMPUTE, _COMMUNICATION = 1, 2
_THREADS = {_COMPUTE: "compute", _COMMUNICATION: "communication"}
_PROCESS = re.compile(r"worker (\d+) · (?:spare|pipeline (\d+) stage (\d+))")


def category(span: Span) -> str:
    """``forward``, ``recompute``, ``backward``, ``weight``, or the span's own name."""
    return span.name if span.task is None else _TASK_CATEGORIES[span.task.kind]


def process_name(trace: WorkerTrace) -> str:
    """``worker 3 · pipeline 0 stage 1``, or ``worker 4 · spare``."""
    at = trace.position
    place = "spare" if at is None else f"pipeline {at.pipeline_index} stage {at.stage_index}"
    return f"worker {trace.worker_index} · {place}"


def encode_trace(traces: Sequence[WorkerTrace], notes: Mapping[str, str] | None = None) -> bytes:
    """Trace events as JSON. Time 0 is the start of the first step on the first worker to begin it.

    Args:
        traces: of workers whose clocks agree.
        notes: shown by Perfetto under "info and stats": where the trace is from.
    """
    starts = [step.started_s for trace in traces for step in trace.steps]
    zero_s = min(starts, default=0.0)
    events = [event for trace in traces for event in _events(trace, zero_s)]
    return msgspec.json.encode({"traceEvents": events, "displayTimeUnit": "ms", "otherData": dict(notes or {})})


def write_trace(path: Path, traces: Sequence[WorkerTrace], notes: Mapping[str, str] | None = None) -> None:
    """Write ``encode_trace``'s bytes, replacing the file at once: nobody ever sees half of it.

    Raises:
        ConfigError: it cannot be written there.
    """
    partial = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        try:
            partial.write_bytes(encode_trace(traces, notes))
            os.replace(partial, path)
        finally:
            partial.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write the trace {path}: {error.strerror}.") from error


def save_trace(path: str, workers: Sequence[WorkerTrace], *, clock_accuracy_s: float) -> str:
    """Write the trace of a run that goes on; returns a line that says so, or why not: that ends no run."""
    if not workers:
        return f"{path} is not written: no step to trace was run."
    steps = [step.step_index for step in workers[0].steps]
    clocks = "shared by all workers"
    if clock_accuracy_s > 0:
        clocks = f"of different machines, aligned to within {human_seconds(clock_accuracy_s)}"
    try:
        write_trace(Path(path), workers, {"source": "recorded", "clocks": clocks})
    except ConfigError as error:
        return str(error)
    which = f"step {steps[0]}" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]}"
    return (
        f"{path} has what {len(workers)} workers did in {which}: open it in https://ui.perfetto.dev, or with "
        f"`varuna timeline`."
    )


def read_trace(path: Path) -> tuple[WorkerTrace, ...]:
    """What ``write_trace`` wrote, to a nanosecond.

    Raises:
        ConfigError: there is no such file, or it is not a trace that Varuna wrote.
    """
    try:
        data = path.read_bytes()
        events = msgspec.json.decode(data)["traceEvents"]
        names = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
        by_step: dict[int, dict[int, list[dict[str, Any]]]] = {process_id: {} for process_id in names}
        for event in events:
            if event["ph"] == "X":
                by_step[event["pid"]].setdefault(event["args"]["step"], []).append(event)
        return tuple(_worker(names[process_id], steps) for process_id, steps in by_step.items())
    except OSError as error:
        raise ConfigError(f"Cannot read the trace {path}: {error.strerror}.") from error
    except (msgspec.DecodeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{path} is not a trace of Varuna's: {explain_broken_json(data) or _lacks(error)}. "
            f"`varuna run --trace FILE` and `varuna simulate --chrome-trace FILE` write one."
        ) from error


def _lacks(error: Exception) -> str:
    """Why JSON is no trace, in words."""
    if isinstance(error, KeyError):
        return f"there is no {error.args[0]!r} where a trace has one"
    if isinstance(error, TypeError):
        return "its values are of other kinds than a trace's"
    return str(error)


def _events(trace: WorkerTrace, zero_s: float) -> Iterator[dict[str, Any]]:
    process_id = trace.worker_index + 1  # 0 is the idle process to some viewers
    yield from _names(trace, process_id)
    for step in trace.steps:
        for span in step.all_spans(later_s=step.started_s - zero_s):
            start_us, end_us = (round(time_s * 1e6, 3) for time_s in (span.start_s, span.end_s))
            on_device = span.task is not None or span.name == UPDATE
            yield {
                "name": span.name,
                "cat": category(span),
                "ph": "X",
                "ts": start_us,
                "dur": round(end_us - start_us, 3),
                "pid": process_id,
                "tid": _thread_id(process_id, _COMPUTE if on_device else _COMMUNICATION),
                "args": {"step": step.step_index},
            }


def _names(trace: WorkerTrace, process_id: int) -> Iterator[dict[str, Any]]:
    """Metadata events: how a viewer labels and orders processes and threads."""
    common = {"ph": "M", "ts": 0, "pid": process_id}
    yield {"name": "process_name", **common, "args": {"name": process_name(trace)}}
    yield {"name": "process_sort_index", **common, "args": {"sort_index": trace.worker_index}}
    for thread, name in _THREADS.items():
        thread_id = _thread_id(process_id, thread)
        yield {"name": "thread_name", **common, "tid": thread_id, "args": {"name": name}}
        yield {"name": "thread_sort_index", **common, "tid": thread_id, "args": {"sort_index": thread}}


def _thread_id(process_id: int, thread: int) -> int:
    """Unique over all processes."""
    return 10 * process_id + thread


def _worker(name: str, steps: Mapping[int, list[dict[str, Any]]]) -> WorkerTrace:
    match = _PROCESS.fullmatch(name)
    if match is None:
        raise ValueError(f"process {name!r}")
    position = None
    if match[2] is not None:
        position = StagePosition(pipeline_index=int(match[2]), stage_index=int(match[3]))
    return WorkerTrace(
        worker_index=int(match[1]),
        position=position,
        steps=tuple(_step(index, steps[index]) for index in sorted(steps)),
    )


def _step(step_index: int, events: Sequence[Mapping[str, Any]]) -> StepSpans:
    started_s = min(event["ts"] for event in events) / 1e6
    spans = [
        Span(
            name=event["name"],
            start_s=event["ts"] / 1e6 - started_s,
            end_s=(event["ts"] + event["dur"]) / 1e6 - started_s,
        )
        for event in events
    ]
    return StepSpans(
        step_index=step_index,
        started_s=started_s,
        tasks=tuple(
            TaskSpan(task=span.task, start_s=span.start_s, end_s=span.end_s) for span in spans if span.task
        ),
        others=tuple(span for span in spans if span.task is None),
    )
