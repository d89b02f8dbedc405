"""Progress for a person: a live line on a terminal, plain lines anywhere else. Writes to standard error.

On a terminal one line stays at the bottom and everything else scrolls above it:

    120/1000 ━━━━━━╸━━━━━━━━━━  loss 2.314 █▆▅▄▃▃▂▁  lr 3.00e-04  norm 0.87  12.3k tok/s  1.24 GiB  1:02 left

Elsewhere (a file, a pipe, ``TERM=dumb``) the first step, the last, every tenth of the way and about every five
seconds give a line; the interval grows to a minute in long runs. ``NO_COLOR`` is respected. Only worker 0 shows
progress.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import TextIO

from rich.console import Console

from varuna.clock import Clock, MonotonicClock
from varuna.errors import WantedEnd
from varuna.events import (
    CaptureFinished,
    CheckFinished,
    CheckpointFailed,
    CheckpointSaved,
    Evaluated,
    Event,
    EventBus,
    Listener,
    Notice,
    PlanChosen,
    ProfileMeasured,
    Resumed,
    StepFinished,
    TrainFinished,
    TrainStarted,
)
from varuna.observe.live import LiveLine
from varuna.observe.stepline import Tracker
from varuna.observe.text import human_bytes, human_duration, human_seconds
from varuna.plan import render_plan
from varuna.spec import Plan, SectionSpec

DescribePlan = Callable[[Plan, Sequence[SectionSpec]], str]

_SHORTEST_INTERVAL_S = 5.0
_LONGEST_INTERVAL_S = 60.0
_INTERVAL_SHARE = 1 / 60  # of the time so far


def show_progress(
    bus: EventBus, worker_index: int, *, stream: TextIO | None = None, clock: Clock | None = None
) -> None:
    """Let a person follow the run, if this is worker 0.

    Args:
        bus: the run's events.
        worker_index: this worker.
        stream: where to write; standard error by default.
        clock: the time; the machine's by default.
    """
    if worker_index == 0:
        bus.subscribe(progress_listener(stream=stream, clock=clock))


def progress_listener(*, stream: TextIO | None = None, clock: Clock | None = None) -> Listener:
    """A live line if ``stream`` is a terminal that can move its cursor, else plain lines."""
    stream = sys.stderr if stream is None else stream
    clock = MonotonicClock() if clock is None else clock
    console = Console(file=stream)
    if console.is_terminal and not console.is_dumb_terminal:
        return LiveProgress(console, clock)
    return PlainProgress(stream, clock)


class PlainProgress:
    """Plain lines, each written whole."""

    def __init__(self, stream: TextIO, clock: Clock, describe_plan: DescribePlan = render_plan) -> None:
        self._stream = stream
        self._clock = clock
        self._narrator = Narrator(describe_plan)
        self._tracker: Tracker | None = None
        self._printed_s = 0.0
        self._printed_tenth = 0

    def __call__(self, event: Event) -> None:
        """Take one event."""
        now_s = self._clock.now_s()
        if isinstance(event, TrainStarted):
            self._tracker = Tracker(event, now_s)
            self._printed_tenth = 0
        if isinstance(event, StepFinished):
            self._take_step(event, now_s)
        for line in self._narrator.lines(event):
            self._write(line)

    def _take_step(self, event: StepFinished, now_s: float) -> None:
        assert self._tracker is not None, "a step before the training started"
        step_line = self._tracker.take(event.step, now_s)
        tenth = 10 * step_line.num_done // max(1, step_line.num_steps)
        interval_s = plain_interval_s(self._tracker.elapsed_s(now_s))
        is_due = (
            step_line.num_done in (1, step_line.num_steps)
            or tenth > self._printed_tenth
            or now_s - self._printed_s >= interval_s
            or event.step.skipped
        )
        if is_due:
            self._printed_s, self._printed_tenth = now_s, tenth
            self._write(step_line.plain())

    def _write(self, line: str) -> None:
        self._stream.write(line + "\n")
        self._stream.flush()


class LiveProgress:
    """A live line at the bottom of a terminal; prints of this process go above it."""

    def __init__(self, console: Console, clock: Clock, describe_plan: DescribePlan = render_plan) -> None:
        self._clock = clock
        self._narrator = Narrator(describe_plan)
        self._tracker: Tracker | None = None
        self._line = LiveLine(console)

    def __call__(self, event: Event) -> None:
        """Take one event."""
        now_s = self._clock.now_s()
        if isinstance(event, TrainFinished):
            self._line.stop()
        for line in self._narrator.lines(event):
            self._line.print_above(line)
        if isinstance(event, TrainStarted):
            self._tracker = Tracker(event, now_s)
            self._line.start(self._tracker.waiting())
        elif isinstance(event, StepFinished):
            assert self._tracker is not None, "a step before the training started"
            self._line.show(self._tracker.take(event.step, now_s), now_s)


class Narrator:
    """What to say about each event other than a step."""

    def __init__(self, describe_plan: DescribePlan) -> None:
        self._describe_plan = describe_plan
        self._sections: tuple[SectionSpec, ...] = ()

    def lines(self, event: Event) -> list[str]:
        """Lines of text, none for a step."""
        match event:
            case CaptureFinished():
                self._sections = event.sections
                how = "from the cache" if event.from_cache else "captured"
                return [f"Model: {_plural(len(event.sections), 'section')}, {how} in "
                        f"{human_duration(event.duration_s)}."]  # fmt: skip
            case ProfileMeasured(from_cache=False):
                return [f"Profile: {_plural(event.num_sections, 'section')} measured in "
                        f"{human_duration(event.duration_s)}."]  # fmt: skip
            case ProfileMeasured():
                steps = _plural(event.num_refinements, "step")
                refined = f", refined by {steps} of training" if event.num_refinements else ""
                return [f"Profile: from an earlier start{refined}."]
            case CheckFinished(skipped_reason=""):
                return [f"Check: the split step equals the unsplit one (largest difference "
                        f"{event.max_difference:.1e})."]  # fmt: skip
            case CheckFinished():
                return [f"Check: left out, {event.skipped_reason}."]
            case PlanChosen():
                return self._plan_lines(event)
            case TrainStarted():
                begin, end = event.first_step + 1, event.first_step + event.num_steps
                if begin > end:
                    return [f"Training: all {_plural(event.first_step, 'step')} are done."]
                return [f"Training: steps {begin} to {end}."]
            case Evaluated():
                return [f"Evaluation: loss {event.loss:.4f} over {_plural(event.num_samples, 'sample')} in "
                        f"{human_duration(event.duration_s)}."]  # fmt: skip
            case TrainFinished(error=""):
                return [f"Trained {_plural(event.num_steps, 'step')} in {human_duration(event.duration_s)}."]
            case TrainFinished():
                kind = event.error.partition(":")[0]  # whoever reports the error itself says it in full
                kind = "told to leave" if kind == WantedEnd.__name__ else kind
                return [f"Stopped after {_plural(event.num_steps, 'step')}, "
                        f"{human_duration(event.duration_s)} ({kind})."]  # fmt: skip
            case CheckpointSaved(size_bytes=0):
                return [f"Checkpoint: step {event.step:,}: {event.url}"]
            case CheckpointSaved():
                return [f"Checkpoint: step {event.step:,}, {human_bytes(event.size_bytes)} in "
                        f"{human_seconds(event.write_s)}, training paused {human_seconds(event.pause_s)}: "
                        f"{event.url}"]  # fmt: skip
            case CheckpointFailed():
                return [f"Note: no checkpoint of step {event.step:,}: {event.reason.rstrip('.')}. Training "
                        f"goes on; older checkpoints stay."]  # fmt: skip
            case Resumed():
                return [f"Goes on from the checkpoint of step {event.step:,}: {event.url}"]
            case Notice():
                return [f"Note: {event.text}"]
            case _:
                return []

    def _plan_lines(self, event: PlanChosen) -> list[str]:
        plan = event.plan
        lines = [f"Plan {event.generation}: {event.reason}".rstrip(": ")]
        if self._sections:
            lines += [f"  {line}".rstrip() for line in self._describe_plan(plan, self._sections).splitlines()]
        return lines


def plain_interval_s(elapsed_s: float) -> float:
    """Seconds between plain lines: 5 in the first minutes, up to a minute after an hour."""
    return min(_LONGEST_INTERVAL_S, max(_SHORTEST_INTERVAL_S, elapsed_s * _INTERVAL_SHARE))


def _plural(count: int, noun: str) -> str:
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
