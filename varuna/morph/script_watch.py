"""Where a member's training thread is when its generation is to end: in a call of Varuna's, or in the script.

A call is broken off at once. The script's own code (a validation of its own, an upload) ends when it ends; the
manager is told, so that it waits. Whoever keeps the others waiting for long says in its log where it is.
"""

from __future__ import annotations

import sys
import threading
import traceback
from collections.abc import Callable
from itertools import dropwhile
from pathlib import Path

from varuna.morph.messages import InScript

PATIENCE_S = 20.0
"""A generation that has not ended here so long after it should have is worth a look at the training thread."""

_LAUNCH = str(Path(__file__).parents[1] / "launch")


class ScriptWatch:
    """Follows one training thread.

    Args:
        worker: its worker's name, for people.
        tell: sends a message to the manager; never blocks.
    """

    def __init__(self, worker: str, tell: Callable[[InScript], None]) -> None:
        self._worker = worker
        self._tell = tell
        self._lock = threading.Lock()
        self._in_script = True
        self._ending: int | None = None
        self._last_ended = -1
        self._timer: threading.Timer | None = None

    def in_script(self, value: bool) -> None:
        """The training thread goes to the script's own code, or comes back from there."""
        with self._lock:
            self._in_script = value
            if self._ending is not None:
                self._tell(InScript(generation=self._ending, is_there=value))

    def should_end(self, generation: int) -> None:
        """The manager wants a generation to end here; it may say so again, and after it has ended."""
        with self._lock:
            if generation <= self._last_ended:
                return
            is_news, self._ending = self._ending != generation, generation
            if self._in_script:
                self._tell(InScript(generation=generation, is_there=True))
            if is_news:
                self._stop_timer()
                training = threading.main_thread()
                self._timer = threading.Timer(PATIENCE_S, self._show, (generation, training))
                self._timer.daemon = True
                self._timer.start()

    def ended(self, generation: int) -> None:
        """The training thread has reported; it waits for what follows."""
        with self._lock:
            self._ending, self._last_ended = None, generation
            self._stop_timer()

    def _stop_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _show(self, generation: int, training: threading.Thread) -> None:
        frame = sys._current_frames().get(training.ident or 0)
        with self._lock:
            if self._ending != generation or frame is None:
                return
            what = "its script is in code of its own" if self._in_script else "it is"
        where = "".join(traceback.format_list(_without_launch(traceback.extract_stack(frame))))
        sys.stderr.write(
            f"varuna: {self._worker} was told {PATIENCE_S:g} s ago that generation {generation} ends, and the "
            f"others wait for it: {what} here:\n{where}"
        )


def _without_launch(frames: list[traceback.FrameSummary]) -> list[traceback.FrameSummary]:
    """Without those by which the launcher came to the script."""
    return list(
        dropwhile(lambda frame: frame.filename == "<string>" or frame.filename.startswith(_LAUNCH), frames)
    )
