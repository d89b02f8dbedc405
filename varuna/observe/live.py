"""A line that stays at the bottom of a terminal while prints scroll above it; no thread, no hidden cursor."""

from __future__ import annotations

import sys
from dataclasses import dataclass

from rich.console import Console
from rich.live import Live
from rich.text import Text

from varuna.observe.stepline import StepLine

_SHORTEST_REFRESH_S = 0.1


@dataclass
class LiveLine:
    """The line; ``start`` and ``stop`` may be called again and again."""

    console: Console
    _live: Live | None = None
    _shown_s: float = float("-inf")

    def start(self, text: Text) -> None:
        """Show the line."""
        self.stop()
        self._live = Live(
            text,
            console=self.console,
            auto_refresh=False,
            transient=False,
            redirect_stdout=sys.stdout.isatty(),  # a script's output to a file stays its own
            redirect_stderr=False,
        )
        self._live.start(refresh=True)
        self.console.show_cursor(True)  # a killed process must not leave a terminal without one
        self._shown_s = float("-inf")

    def show(self, step_line: StepLine, now_s: float) -> None:
        """Bring the line up to date, at most ten times a second; the last step always."""
        assert self._live is not None, "shown before start"
        is_last = step_line.num_done >= step_line.num_steps
        is_due = now_s - self._shown_s >= _SHORTEST_REFRESH_S or is_last
        if is_due:
            self._shown_s = now_s
        self._live.update(step_line.live(self.console.width), refresh=is_due)

    def print_above(self, line: str) -> None:
        """A line of text that scrolls away."""
        self.console.print(Text(line), soft_wrap=True)

    def stop(self) -> None:
        """Leave the line where it is and give the terminal back."""
        if self._live is not None:
            self._live.stop()
            self._live = None
