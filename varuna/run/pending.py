"""Operations of a process group under way, and how long to wait for them: as long as their generation lives.

gloo may lose a message for good: one that it could not write any more, because the connection broke at that
moment, is never reported to whoever waits for it, neither as sent nor as failed, before the group's timeout.
So a wait looks up from time to time whether the generation was closed meanwhile.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from datetime import timedelta

from torch.distributed import Work

from varuna.aside import start_aside
from varuna.errors import PeerLost

IsClosed = Callable[[], bool]
"""Whether the generation was closed meanwhile, by another thread."""

Wait = Callable[[Work, IsClosed], bool]
"""Returns when the work is done, or False when it is not worth waiting any more."""

_LOOK_S = 0.1
"""An expired wait costs 1 ms."""

_PLACE = re.compile(r"^\[[^\]]*\.(cc|cpp|h):\d+\] ")
_ADVICE = re.compile(r"\. This is typically caused by")


class Pending:
    """An operation under way; keep it until ``wait`` has returned.

    Args:
        work: torch's; None: nothing was to be done.
        what: says errors what it is.
        wait_for: how to wait for it.
        is_closed: asked while waiting.
    """

    def __init__(self, work: Work | None, what: str, wait_for: Wait, is_closed: IsClosed) -> None:
        self._work = work
        self._what = what
        self._wait_for = wait_for
        self._is_closed = is_closed

    def wait(self) -> None:
        """Block until done (CUDA: until the current stream waits for it). ``PeerLost`` if it failed."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            is_done = self._wait_for(work, self._is_closed)
        except RuntimeError as error:
            raise PeerLost(f"{self._what} failed: {reason_of(error)}.") from error
        if not is_done:
            raise PeerLost(f"{self._what} was given up: its generation was closed meanwhile.")


def wait_for_stream(work: Work, _is_closed: IsClosed) -> bool:
    """Wait as NCCL does: it is the current stream that waits."""
    work.wait()
    return True


def wait_for_collective(work: Work, is_closed: IsClosed) -> bool:
    """Wait for gloo in this thread. Not for sends and receives: an expired wait breaks their connection."""
    while True:
        try:
            work.wait(timedelta(seconds=_LOOK_S))
            return True
        except RuntimeError:
            if work.is_completed():
                work.wait()  # what it came to: it may have ended just after this look
                return True
        if is_closed():
            return False


def wait_for_message(work: Work, is_closed: IsClosed) -> bool:
    """Wait for gloo's send or receive in another thread, which is left alone when the generation was closed."""
    ended = threading.Event()
    failures: list[RuntimeError] = []

    def wait() -> None:
        try:
            work.wait()
        except RuntimeError as error:
            failures.append(error)
        ended.set()

    start_aside(wait, "varuna-message")
    while not ended.wait(_LOOK_S):
        if is_closed():
            return False
    if failures:
        raise failures[0]
    return True


def reason_of(error: RuntimeError) -> str:
    """What gloo says, without the source line before it and the advice after it."""
    return _ADVICE.split(_PLACE.sub("", str(error)))[0].rstrip(".")
