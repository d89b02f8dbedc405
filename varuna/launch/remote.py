"""A machine that is reached by OpenSSH: starts ``varuna agent`` there and passes on what it prints."""

from __future__ import annotations

import os
import shlex
import signal
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna.launch.hosts import HostLine
from varuna.launch.orders import Header, Order, Word, encode_header, encode_order
from varuna.launch.output import PrefixedStream, write_stderr, write_stdout

UNREACHABLE = 255
"""What ssh exits with when it did not get through, or was cut off."""

_OPTIONS = ("-o", "BatchMode=yes", "-o", "ServerAliveInterval=15", "-o", "ServerAliveCountMax=4")
"""Nobody is asked for a password; a machine that is gone is given up after a minute. The user's come first."""


@dataclass(frozen=True, kw_only=True)
class RemoteCommand:
    """What to run on every machine.

    Attributes:
        ssh: the user's ssh command with options.
        directory: where it runs.
        python: the interpreter there.
        agent: arguments of ``varuna agent``, but for the machine's own; the script and its arguments last.
        header: what it is told on standard input.
    """

    ssh: tuple[str, ...]
    directory: str
    python: str
    agent: tuple[str, ...]
    header: Header


def ssh_arguments(command: RemoteCommand, line: HostLine) -> list[str]:
    """The command that runs here. Everything behind the destination is one word, quoted for the shell there."""
    own = ["--name", line.name, "--from-launcher"]
    if line.num_workers is not None:
        own += ["--workers", str(line.num_workers)]
    return over_ssh(command, line, ["agent", *own, *command.agent])


def over_ssh(command: RemoteCommand, line: HostLine, words: Sequence[str]) -> list[str]:
    """The command that runs ``varuna`` with these words on a machine, in the same folder as here."""
    script = (
        f"cd {shlex.quote(command.directory)} && exec {shlex.join([command.python, '-m', 'varuna', *words])}"
    )
    return [*command.ssh, *_OPTIONS, "-T", line.destination, f"exec /bin/sh -c {shlex.quote(script)}"]


class RemoteMachine:
    """An agent elsewhere, for as long as its ssh lives.

    Args:
        command: what to run.
        line: where.
        log_dir: what it prints goes there, to ``machine-NAME.log``, besides to this terminal behind its name.
    """

    def __init__(self, command: RemoteCommand, line: HostLine, log_dir: Path) -> None:
        self.line = line
        self.was_told = False
        self._process = subprocess.Popen(
            ssh_arguments(command, line),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            start_new_session=True,  # the terminal's signals reach the launcher alone
        )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        assert self._process.stderr is not None
        self._stdin = self._process.stdin
        log = log_dir / f"machine-{line.name.replace('/', '_')}.log"
        prefix = f"[{line.name}] "
        self.streams = tuple(
            PrefixedStream(os.dup(pipe.fileno()), prefix, log.open("ab", buffering=0), sink)
            for pipe, sink in ((self._process.stdout, write_stdout), (self._process.stderr, write_stderr))
        )
        self._process.stdout.close()
        self._process.stderr.close()
        self._write(encode_header(command.header))

    @property
    def name(self) -> str:
        """The machine's."""
        return self.line.name

    def tell(self, word: Word) -> None:
        """Ask it to leave the job, or to stop."""
        self.was_told = True
        self._write(encode_order(Order(word=word)))

    def exit_code(self) -> int | None:
        """Of the agent there, once it has ended; ``UNREACHABLE`` if that is not known."""
        return self._process.poll()

    def close(self, timeout_s: float = 0.0) -> None:
        """Wait for the agent there to end by itself, then cut the line, after which it does. Idempotent."""
        try:
            self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self._process.send_signal(signal.SIGTERM)
        if not self._stdin.closed:
            self._cut()
        self._process.wait()
        for stream in self.streams:
            if stream.is_open:
                stream.pump()
            stream.close()

    def _write(self, data: bytes) -> None:
        try:
            self._stdin.write(data)
            self._stdin.flush()
        except BrokenPipeError:  # ssh has ended; its exit code says why
            self._cut()

    def _cut(self) -> None:
        try:
            self._stdin.close()
        except BrokenPipeError:
            assert self._stdin.closed


def default_ssh(text: str) -> tuple[str, ...]:
    """A user's ssh command as words."""
    words: Sequence[str] = shlex.split(text) or ["ssh"]
    return tuple(words)
