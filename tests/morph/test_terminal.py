"""Taking the terminal, in a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import varuna

PROGRAM = """
import os, subprocess, sys
from varuna.morph.terminal import offer_terminal, take_terminal
environ = {}
assert not take_terminal(environ)
print("to the log")
offer_terminal(environ, [int(fd) for fd in sys.argv[1:]])
print("still to the log")
subprocess.run([sys.executable, "-c", "import os; print(len(os.listdir('/proc/self/fd')))"], close_fds=False)
assert take_terminal(environ)
assert not take_terminal(environ)
print("to the terminal", flush=True)
print("its errors", file=sys.stderr, flush=True)
print(sys.stdin.read())
"""


def test_streams_go_elsewhere_from_then_on() -> None:
    pipes = [os.pipe() for _ in range(3)]
    (stdin, stdin_writer), (stdout_reader, stdout), (stderr_reader, stderr) = pipes
    os.write(stdin_writer, b"typed")
    os.close(stdin_writer)
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(stdin), str(stdout), str(stderr)],
        pass_fds=(stdin, stdout, stderr),
        env={**os.environ, "PYTHONPATH": str(Path(varuna.__file__).parent.parent)},
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    for fd in (stdin, stdout, stderr):
        os.close(fd)
    assert (done.returncode, done.stderr) == (0, "")
    first, second, num_inherited = done.stdout.splitlines()
    assert (first, second) == ("to the log", "still to the log")
    assert int(num_inherited) <= 4  # standard streams, and the listing's own
    with open(stdout_reader) as reader:
        assert reader.read() == "to the terminal\ntyped\n"
    with open(stderr_reader) as reader:
        assert reader.read() == "its errors\n"
