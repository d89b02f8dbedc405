"""Where workers' output goes: worker 0 speaks to the terminal, the others to log files and on request to both.

Worker 0 gets the launcher's own descriptors, so a progress line sees a terminal when there is one. Every other
worker writes standard output and error, in order, to ``worker-<i>.log``; with ``show="all"`` the launcher
stands between and repeats each line on its own output behind ``[worker <i>] ``. A log that cannot be written (a
full disk, a folder that was removed) ends no job. Where workers come and go, each
is also given the launcher's descriptors, to speak to the terminal itself when it becomes worker 0.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, Literal

Show = Literal["first", "all"]

_READ_BYTES = 65536
_TAIL_BYTES = 16384


@dataclass(frozen=True, kw_only=True)
class WorkerStreams:
    """Descriptors for a worker's standard streams; ``close`` them once the worker has its copies."""

    stdin: int
    stdout: int
    stderr: int
    owned: tuple[int, ...]

    def close(self) -> None:
        """Close what was opened for this worker alone."""
        for fd in self.owned:
            os.close(fd)


class PrefixedStream:
    """Repeats what arrives on a pipe: every line to the log, and with a prefix to a sink.

    It owns pipe and log, and closes both at the end of the stream.
    """

    def __init__(self, fd: int, prefix: str, log: BinaryIO, sink: Callable[[bytes], None]) -> None:
        os.set_blocking(fd, False)
        self.fd = fd
        self.is_open = True
        self._prefix = prefix.encode()
        self._log = log
        self._sink = sink
        self._partial = b""

    def pump(self) -> bool:
        """Pass on what has arrived; False at the end of the stream, whose last line may lack its newline."""
        while True:
            try:
                data = os.read(self.fd, _READ_BYTES)
            except BlockingIOError:
                return True
            if not data:
                self._pass_on([self._partial] if self._partial else [])
                self._partial = b""
                self.close()
                return False
            *lines, self._partial = (self._partial + data).split(b"\n")
            self._pass_on(lines)

    def close(self) -> None:
        """Close pipe and log. Idempotent."""
        if self.is_open:
            self.is_open = False
            os.close(self.fd)
            self._log.close()

    def _pass_on(self, lines: list[bytes]) -> None:
        for line in lines:
            with contextlib.suppress(OSError):
                self._log.write(line + b"\n")
            self._sink(self._prefix + line + b"\n")


class Output:
    """The log files and pipes of one job.

    Args:
        log_dir: an existing directory; logs of an earlier run there are replaced.
        show: whose output the terminal shows.
    """

    def __init__(self, log_dir: Path, show: Show) -> None:
        self.log_dir = log_dir
        self._pipes: list[PrefixedStream] = []
        self._num_given = 0
        self._show = show
        self._logs: dict[int, Path] = {}

    def streams_for(self, worker_index: int, is_first: bool) -> WorkerStreams:
        """Open what a worker reads and writes; ``is_first`` is worker 0 of the job."""
        if is_first:
            return WorkerStreams(stdin=0, stdout=1, stderr=2, owned=())
        path = self._logs[worker_index] = self.log_dir / f"worker-{worker_index}.log"
        path.unlink(missing_ok=True)
        null = os.open(os.devnull, os.O_RDONLY)
        if self._show == "first":
            log = self._open(path)
            return WorkerStreams(stdin=null, stdout=log, stderr=log, owned=(null, log))
        stdout = self._pipe(worker_index, path, write_stdout)
        stderr = self._pipe(worker_index, path, write_stderr)
        return WorkerStreams(stdin=null, stdout=stdout, stderr=stderr, owned=(null, stdout, stderr))

    def terminal_for(self, is_first: bool) -> tuple[int, ...]:
        """What a worker takes when it becomes worker 0; nothing if the terminal shows its output anyway."""
        return () if is_first or self._show == "all" else (0, 1, 2)

    def new_pipes(self) -> list[PrefixedStream]:
        """Pipes to read from that were made since the last call."""
        new = self._pipes[self._num_given :]
        self._pipes = [pipe for pipe in self._pipes if pipe.is_open]  # workers that have ended are done with
        self._num_given = len(self._pipes)
        return new

    def append(self, worker_index: int, text: str) -> None:
        """Add the launcher's own words to a worker's log; worker 0 has none."""
        if worker_index in self._logs:
            with contextlib.suppress(OSError), self._logs[worker_index].open("ab") as log:
                log.write(text.encode())

    def tail(self, worker_index: int, num_lines: int) -> str:
        """The last lines of a worker's log; empty for worker 0, whose output was seen."""
        path = self._logs.get(worker_index)
        if path is None:
            return ""
        data = b""
        with contextlib.suppress(OSError), path.open("rb") as reader:
            size = reader.seek(0, os.SEEK_END)
            reader.seek(max(0, size - _TAIL_BYTES))
            data = reader.read()
        return "\n".join(data.decode(errors="replace").splitlines()[-num_lines:])

    def close(self) -> None:
        """Pass on what is left and close all."""
        for pipe in self._pipes:
            if pipe.is_open:
                pipe.pump()
            pipe.close()
        self._pipes.clear()

    def _open(self, path: Path) -> int:
        """A log; nowhere if there can be none."""
        try:
            return os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o666)
        except OSError as error:
            say(f"no log {path}: {error}")
            return os.open(os.devnull, os.O_WRONLY)

    def _pipe(self, worker_index: int, path: Path, sink: Callable[[bytes], None]) -> int:
        reader, writer = os.pipe()
        log = os.fdopen(self._open(path), "ab", buffering=0)
        self._pipes.append(PrefixedStream(reader, f"[worker {worker_index}] ", log, sink))
        return writer


def say(text: str) -> None:
    """One line of the launcher's own on standard error."""
    sys.stderr.write(f"varuna: {text}\n")
    sys.stderr.flush()


def write_stdout(line: bytes) -> None:
    """To this process's standard output, at once."""
    sys.stdout.buffer.write(line)
    sys.stdout.buffer.flush()


def write_stderr(line: bytes) -> None:
    """To this process's standard error, at once."""
    sys.stderr.buffer.write(line)
    sys.stderr.buffer.flush()
