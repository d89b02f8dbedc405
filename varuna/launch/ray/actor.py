"""What runs on each node of a Ray cluster: an actor that starts ``varuna agent`` and passes on what it prints.

Ray imports this on the node; it needs neither Ray nor torch. What goes to and fro is bytes.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import IO

import msgspec

_MOST_BYTES = 1 << 15  # of each stream at once: Ray sends what is small without its object store
_LONGEST_READ_S = 5.0


class Heard(msgspec.Struct, frozen=True, kw_only=True):
    """What has come of an agent since the last time.

    Attributes:
        stdout, stderr: what it printed.
        code: its exit code, once it has ended and all was heard.
    """

    stdout: bytes = b""
    stderr: bytes = b""
    code: int | None = None


class NodeAgent:
    """The agent of one node. It ends when its standard input does, so with this object's process at the latest.

    Args:
        arguments: of ``varuna agent``.
        directory: where it runs; empty for where Ray runs the actor.
    """

    def __init__(self, arguments: Sequence[str], directory: str) -> None:
        self._arguments = arguments
        self._directory = directory
        self._process: subprocess.Popen[bytes] | None = None
        self._open: list[IO[bytes]] = []

    def start(self, header: bytes) -> str:
        """Start it, if that was not done; returns why that cannot be, or nothing.

        Args:
            header: what it is told first on standard input; see ``orders``.
        """
        if self._process is not None:
            return ""
        if self._directory and not Path(self._directory).is_dir():
            return (
                f"there is no folder {self._directory}. Start the command in a folder that all nodes have, or "
                f"with `ray job submit --working-dir`"
            )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "varuna", "agent", *self._arguments],
            cwd=self._directory or None,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,
        )
        self._open = [pipe for pipe in (self._process.stdout, self._process.stderr) if pipe is not None]
        for pipe in self._open:
            os.set_blocking(pipe.fileno(), False)
        self.tell(header)
        return ""

    def read(self, wait_s: float = _LONGEST_READ_S) -> bytes:
        """Wait for output or the end, but not longer than this; returns an encoded ``Heard``."""
        assert self._process is not None
        with selectors.DefaultSelector() as selector, contextlib.suppress(subprocess.TimeoutExpired):
            for pipe in self._open:
                selector.register(pipe, selectors.EVENT_READ)
            if self._open:
                selector.select(wait_s)
            else:
                self._process.wait(wait_s)
        code = self._process.poll()
        stdout, stderr = self._read(self._process.stdout), self._read(self._process.stderr)
        has_more = _MOST_BYTES in (len(stdout), len(stderr))
        return msgspec.msgpack.encode(Heard(stdout=stdout, stderr=stderr, code=None if has_more else code))

    def tell(self, line: bytes) -> None:
        """Pass on an order."""
        assert self._process is not None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # it has ended, and its exit code will say why
            self._process.stdin.write(line)
            self._process.stdin.flush()

    def _read(self, pipe: IO[bytes] | None) -> bytes:
        """What is there by now, up to ``_MOST_BYTES``."""
        read = b""
        while pipe in self._open and len(read) < _MOST_BYTES:
            try:
                data = os.read(pipe.fileno(), _MOST_BYTES - len(read))
            except BlockingIOError:
                break
            if not data:
                self._open.remove(pipe)
            read += data
        return read
