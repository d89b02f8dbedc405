"""Threads that may be held up by gloo for as long as a group's timeout, so that nobody waits for them.

They are daemons: a process may end without them. But one that is just about to end must not be caught by the
interpreter's end inside torch's code, which would abort the process: they get a moment then.
"""

from __future__ import annotations

import atexit
import threading
import time
from collections.abc import Callable

_AT_EXIT_S = 1.0

_started: set[threading.Thread] = set()
_lock = threading.Lock()


def start_aside(target: Callable[[], None], name: str) -> None:
    """Run ``target`` in a thread of this name."""

    def run() -> None:
        try:
            target()
        finally:
            with _lock:
                _started.discard(thread)

    thread = threading.Thread(target=run, name=name, daemon=True)
    with _lock:
        _started.add(thread)
    thread.start()


@atexit.register
def _wait_a_moment() -> None:
    last_s = time.monotonic() + _AT_EXIT_S
    with _lock:
        threads = list(_started)
    for thread in threads:
        thread.join(max(0.0, last_s - time.monotonic()))
