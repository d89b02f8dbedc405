"""What Linux offers so that no process outlives its job: parent-death signals, subreapers, process groups.

Elsewhere than on Linux the first two do nothing; the end of stream on the control socket remains.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import sys
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_NAME = 15
_PR_SET_CHILD_SUBREAPER = 36


def die_with_parent(signum: int) -> None:
    """Have the kernel send this process ``signum`` when the thread that forked it ends; 0 takes that back."""
    _prctl(_PR_SET_PDEATHSIG, signum)


def adopt_orphans() -> None:
    """Become the parent of every descendant whose own parent ends."""
    _prctl(_PR_SET_CHILD_SUBREAPER, 1)


def set_process_name(name: str) -> None:
    """What ``top`` and ``ps -o comm`` show; cut to 15 bytes."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_NAME, ctypes.c_char_p(name.encode()[:15]), 0, 0, 0)


def kill_group(group_id: int, signum: int) -> None:
    """Signal every process of a group; none left is no error."""
    with contextlib.suppress(ProcessLookupError, PermissionError):  # PermissionError: only zombies left (macOS)
        os.killpg(group_id, signum)


def kill_children() -> None:
    """Kill and reap all children of this process, and theirs too, which it adopts (``adopt_orphans``)."""
    while children := _children():
        for pid in children:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for pid in children:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, 0)


def exit_code(status: int) -> int:
    """Exit code, or minus the signal's number, of a wait status."""
    return os.waitstatus_to_exitcode(status)


def num_threads() -> int:
    """Threads of this process, native ones included; 1 where that cannot be known."""
    tasks = Path("/proc/self/task")
    return len(list(tasks.iterdir())) if tasks.is_dir() else 1


def _children() -> list[int]:
    listing = Path(f"/proc/self/task/{os.getpid()}/children")
    try:
        return [int(pid) for pid in listing.read_text().split()]
    except FileNotFoundError:  # not Linux, or a kernel without the listing
        return []


def _prctl(option: int, value: int) -> None:
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(option, value, 0, 0, 0)
