"""One step as a line: what to show of it, and what to leave out first when there is little room."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

from rich.text import Text

from varuna.events import TrainStarted
from varuna.observe.text import human_bytes, human_count, human_duration, sparkline
from varuna.spec import Step

_NUM_LOSSES = 12  # in the small curve
_SMOOTHING = 0.1  # weight of the newest step in the mean duration


@dataclass(frozen=True, kw_only=True)
class StepLine:
    """What is known after one step.

    Attributes:
        step: the step.
        num_done, num_steps: steps done and to do in this call of ``train``.
        end_step: steps of the job when it is done.
        losses: the newest losses, the last one this step's.
        left_s: expected seconds to the end.
    """

    step: Step
    num_done: int
    num_steps: int
    end_step: int
    losses: tuple[float, ...]
    left_s: float

    def plain(self) -> str:
        """Aligned columns without colour; no curve and no bar."""
        width = len(str(self.end_step))
        fields = [
            f"step {self.step.index + 1:>{width}}/{self.end_step}",
            f"loss {self.step.loss:<7.4f}",
            f"norm {_norm(self.step)}",
            f"lr {self.step.lr:.2e}",
            _rate(self.step),
            _memory(self.step),
        ]
        if self.num_done < self.num_steps:
            fields.append(f"{_left(self.left_s)} left")
        if self.step.skipped:
            fields.append(_skipped(self.step))
        return "  ".join(fields).rstrip()

    def live(self, width: int) -> Text:
        """One line of at most ``width`` columns: a bar and the fields, the least needed left out first."""
        digits = len(str(self.end_step))
        head = Text(f"{self.step.index + 1:>{digits}}/{self.end_step}", style="bold")
        fields = self._fields()
        bar_width = 20
        while True:
            tail = Text("  ").join(text for _, text in fields)
            room = width - head.cell_len - tail.cell_len - 3
            if room >= 6 or len(fields) == 1:
                break
            fields.remove(max(fields, key=lambda field: field[0]))
        line = Text(no_wrap=True, overflow="crop", end="").append_text(head).append(" ")
        if room >= 6:
            line.append_text(bar(self.num_done / max(1, self.num_steps), min(bar_width, room)))
        line.append("  ").append_text(tail)
        line.truncate(width)
        return line

    def _fields(self) -> list[tuple[int, Text]]:
        """(order in which it may be left out, greatest first; text), from left to right."""
        step = self.step
        fields = [
            (0, Text.assemble(("loss ", "dim"), (f"{step.loss:.4f}", "bold green"))),
            (7, Text(f"{sparkline(self.losses):>{_NUM_LOSSES}}", style="green")),
            (5, Text.assemble(("lr ", "dim"), f"{step.lr:.2e}")),
            (6, Text.assemble(("norm ", "dim"), _norm(step))),
            (2, Text(_rate(step), style="cyan")),
            (4, Text(_memory(step), style="magenta")),
        ]
        if self.num_done < self.num_steps:
            fields.append((3, Text(f"{_left(self.left_s)} left", style="yellow")))
        if step.skipped:
            fields.append((1, Text("skipped", style="bold red")))
        return fields


class Tracker:
    """Follows the steps of one ``train`` call: newest losses, mean duration, time left."""

    def __init__(self, started: TrainStarted, now_s: float) -> None:
        self._num_steps = started.num_steps
        self._end_step = started.first_step + started.num_steps
        self._num_done = 0
        self._started_s = now_s
        self._last_s = now_s
        self._mean_s: float | None = None
        self._losses: deque[float] = deque(maxlen=_NUM_LOSSES)

    def elapsed_s(self, now_s: float) -> float:
        """Seconds since ``train`` was called."""
        return now_s - self._started_s

    def waiting(self) -> Text:
        """What to show before the first step is done."""
        first = self._end_step - self._num_steps
        return Text(
            f"{first}/{self._end_step} waiting for the first step", style="dim", no_wrap=True, overflow="crop"
        )

    def take(self, step: Step, now_s: float) -> StepLine:
        """One more step is done. The first is slow (warm-up): the mean forgets it when there is a second."""
        took_s, self._last_s = now_s - self._last_s, now_s
        if self._num_done <= 1 or self._mean_s is None:
            self._mean_s = took_s
        else:
            self._mean_s += _SMOOTHING * (took_s - self._mean_s)
        self._num_done += 1
        self._losses.append(step.loss)
        return StepLine(
            step=step,
            num_done=self._num_done,
            num_steps=self._num_steps,
            end_step=self._end_step,
            losses=tuple(self._losses),
            left_s=self._mean_s * (self._num_steps - self._num_done),
        )


def bar(share: float, width: int) -> Text:
    """A bar of ``width`` columns, ``share`` of it done, in half columns."""
    halves = round(2 * width * min(1.0, max(0.0, share)))
    full, half = divmod(halves, 2)
    text = Text().append("━" * full + ("╸" if half else ""), style="green")
    return text.append("━" * (width - full - half), style="bright_black")


def _rate(step: Step) -> str:
    if step.tokens_per_s is not None:
        return f"{human_count(step.tokens_per_s):>5} tok/s"
    return f"{human_count(step.samples_per_s):>5} samples/s"


def _memory(step: Step) -> str:
    return f"{human_bytes(step.memory_bytes):>8}"


def _norm(step: Step) -> str:
    is_usual = 0.1 <= step.grad_norm < 1000
    return f"{step.grad_norm:<7.2f}" if is_usual else f"{step.grad_norm:<7.1e}"


def _left(seconds: float) -> str:
    """Whole seconds: nobody knows the time left better than that."""
    return f"{seconds:.0f} s" if seconds < 59.5 else human_duration(seconds)


def _skipped(step: Step) -> str:
    return f"skipped: overflow at loss scale {step.loss_scale:.0f}"
