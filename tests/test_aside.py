"""Threads held up in native code: nobody waits for them, and a process that has one ends as it should."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from varuna.aside import start_aside

SCRIPT = """
import atexit, sys, threading
from datetime import timedelta
from torch.distributed import TCPStore
from varuna.aside import leave, start_aside

store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

def held_up():
    while True:
        try:
            store.wait(["never"], timedelta(seconds=0.02))  # in native code, and back again and again
        except Exception:
            pass

if sys.argv[1] == "held up":
    start_aside(held_up, "held up")
unclosed = open(sys.argv[2], "w")
unclosed.write("flushed")
atexit.register(print, "handlers have run")
threading.Thread(target=lambda: print("a thread has ended")).start()
leave(3)
"""


@pytest.mark.parametrize("is_held_up", [False, True])
def test_a_process_ends_with_its_code_whoever_is_held_up(tmp_path: Path, is_held_up: bool) -> None:
    """Left to the interpreter, the process would be aborted in the second case."""
    file = tmp_path / "unclosed"
    command = [sys.executable, "-c", SCRIPT, "held up" if is_held_up else "", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 3, done.stderr
    assert sorted(done.stdout.splitlines()) == ["a thread has ended", "handlers have run"]
    assert "terminate called" not in done.stderr
    assert file.read_text() == "flushed"


def test_nobody_waits_for_it() -> None:
    ended, begun = threading.Event(), time.monotonic()
    start_aside(lambda: ended.wait(60) and None, "a test's")
    assert time.monotonic() - begun < 30
    thread = next(one for one in threading.enumerate() if one.name == "a test's")
    assert thread.daemon
    ended.set()
    thread.join(30)
    assert not thread.is_alive()
