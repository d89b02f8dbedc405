"""One step as text: a row for each worker, a column for each slice of real time.

``plan/render.py`` draws schedules in units of time; here times are uneven. A column shows what the worker did
for most of it: a task is its name, then ``=`` while it goes on, or just its letter where there is no room.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from varuna.errors import ConfigError
from varuna.observe.text import human_seconds
from varuna.plan.spans import UPDATE, Span, StepSpans, WorkerTrace

LEGEND = "F forward, R recompute, B backward, W weight gradients, ~ reduce or commit, U update, . idle"
_MIN_WIDTH = 20


def render_timeline(traces: Sequence[WorkerTrace], *, width: int = 100, step_index: int | None = None) -> str:
    """A step of all workers.

    Args:
        traces: workers whose clocks agree.
        width: columns of the time axis, at least 20.
        step_index: which step; None is the first one.

    Raises:
        ConfigError: no such step, or too narrow.
    """
    if width < _MIN_WIDTH:
        raise ConfigError(f"A timeline of {width} columns is too narrow. Give at least {_MIN_WIDTH}.")
    index, steps = pick_step(traces, step_index)
    zero_s = min(step.started_s for step in steps)
    rows = [step.all_spans(later_s=step.started_s - zero_s) for step in steps]
    end_s = max((span.end_s for row in rows for span in row), default=0.0) or 1.0
    labels = _labels(traces, steps, end_s)
    indent = " " * len(labels[0])
    lines = [f"step {index}: {human_seconds(end_s)}, one column is {human_seconds(end_s / width)}"]
    lines += [f"{label}| {_row(row, end_s, width)}" for label, row in zip(labels, rows, strict=True)]
    lines += [f"{indent}  {line}" for line in (*_scale(end_s, width), LEGEND)]
    return "\n".join(line.rstrip() for line in lines) + "\n"


def pick_step(traces: Sequence[WorkerTrace], step_index: int | None) -> tuple[int, list[StepSpans]]:
    """The step asked for (None: the first that all workers have), and each worker's spans of it.

    Raises:
        ConfigError: not every worker has that step.
    """
    known = [{step.step_index: step for step in trace.steps} for trace in traces]
    common = sorted(set.intersection(*(set(steps) for steps in known))) if known else []
    if not common or (step_index is not None and step_index not in common):
        wanted = "a step" if step_index is None else f"step {step_index}"
        raise ConfigError(f"The trace does not have {wanted} of every worker; it has {common or 'none'}.")
    index = common[0] if step_index is None else step_index
    return index, [steps[index] for steps in known]


def _labels(traces: Sequence[WorkerTrace], steps: Sequence[StepSpans], end_s: float) -> list[str]:
    """Who each row is, and for which share of the step it computed; all of one width."""
    labels = []
    number_width = len(str(max(trace.worker_index for trace in traces)))
    for trace, step in zip(traces, steps, strict=True):
        at = trace.position
        place = "spare" if at is None else f"pipeline {at.pipeline_index} stage {at.stage_index}"
        busy_s = sum(span.end_s - span.start_s for span in step.tasks)
        labels.append((f"worker {trace.worker_index:<{number_width}}  {place}", f"{busy_s / end_s:>4.0%} "))
    place_width = max(len(place) for place, _ in labels)
    return [f"{place:<{place_width}}  busy {busy}" for place, busy in labels]


def _row(spans: Sequence[Span], end_s: float, width: int) -> str:
    owners = _owners(spans, end_s, width)
    text = ""
    while len(text) < width:
        owner = owners[len(text)]
        stop = len(text)
        while stop < width and owners[stop] == owner:
            stop += 1
        room = stop - len(text)
        if owner is None:
            text += "." * room
        else:
            text += _bar(spans[owner], room)
    return text


def _bar(span: Span, room: int) -> str:
    if span.task is None and span.name != UPDATE:
        return "~" * room
    name = "U" if span.task is None else span.name
    return (name if len(name) <= room else name[0]).ljust(room, "=")


def _owners(spans: Sequence[Span], end_s: float, width: int) -> list[int | None]:
    """Per column, the span that takes most of it; None where the worker is idle for more than half of it."""
    column_s = end_s / width
    busy_s = [0.0] * width
    best: list[tuple[float, int | None]] = [(0.0, None)] * width
    for index, span in enumerate(spans):
        first = min(width - 1, int(span.start_s / column_s))
        last = min(width - 1, math.ceil(span.end_s / column_s) - 1)
        for column in range(first, last + 1):
            overlap_s = min(span.end_s, (column + 1) * column_s) - max(span.start_s, column * column_s)
            busy_s[column] += overlap_s
            if overlap_s > best[column][0]:
                best[column] = (overlap_s, index)
    return [owner if busy_s[column] >= column_s / 2 else None for column, (_, owner) in enumerate(best)]


def _scale(end_s: float, width: int) -> tuple[str, str]:
    """An axis with ticks at round times, and the times under them."""
    tick_s = _tick_s(end_s)
    axis, labels = ["-"] * width, ""
    for number in range(int(end_s / tick_s) + 1):
        column = round(number * tick_s / end_s * width)
        label = human_seconds(number * tick_s)
        if column >= width or column < len(labels):
            continue
        axis[column] = "+"
        labels = labels.ljust(column) + label + " "
    return "".join(axis), labels


def _tick_s(end_s: float) -> float:
    """1, 2 or 5 times a power of ten, so that there are 4 to 10 ticks."""
    power = 10.0 ** math.floor(math.log10(end_s / 4))
    return max(factor * power for factor in (1.0, 2.0, 5.0) if factor * power <= end_s / 4)
