"""Threads that may be held up in native code for minutes, and how a process ends that has some.

gloo's own threads can wait for a lost message as long as their group's timeout (``run/pending.py``). Whoever
would have to wait for one leaves that to a daemon thread. One that comes back from native code while the
interpreter takes its last steps would abort the process; so these threads get a moment, and if one is still
held up then, the process ends without those steps.
"""

from __future__ import annotations

import atexit
import gc
import io
import os
import sys
import threading
import time
from collections.abc import Callable
from typing import NoReturn

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


def leave(code: int) -> NoReturn:
    """End this process as ``sys.exit(code)`` does at its outermost level; nobody who is held up delays it."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads that are no daemons
    atexit._run_exitfuncs()
    if _are_held_up():
        _flush_files()
        os._exit(code)
    sys.exit(code)


@atexit.register
def _are_held_up() -> bool:
    """Whether one is still at it after a moment."""
    last_s = time.monotonic() + _AT_EXIT_S
    with _lock:
        threads = list(_started)
    for thread in threads:
        thread.join(max(0.0, last_s - time.monotonic()))
    return any(thread.is_alive() for thread in threads)


def _flush_files() -> None:
    """What the interpreter's end does for files that nobody has closed."""
    for item in gc.get_objects():
        if isinstance(item, io.IOBase):
            try:
                item.flush()
            except (OSError, ValueError):
                continue  # closed, or nobody reads it any more
