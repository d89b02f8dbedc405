"""A preflight of many machines over ssh: each tells its facts, then tries to reach all others.

On each machine runs ``varuna doctor --from-launcher``, which is asked and answers in lines of JSON:

    <- Questions          -> Answer, with a port on which it listens meanwhile
    <- list of Reach      -> list of Reach, with what came of it

Other lines on its standard output, as login shells print them, are passed over. The end of its standard input
ends it, whatever it does.
"""

from __future__ import annotations

import contextlib
import os
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec
from msgspec import Struct

from varuna.errors import ConfigError
from varuna.launch.hosts import HostLine
from varuna.launch.preflight.facts import MachineFacts, Reach
from varuna.launch.preflight.findings import Finding
from varuna.launch.preflight.gather import gather_facts, reach
from varuna.launch.remote import UNREACHABLE, RemoteCommand, over_ssh

_MARK = b"varuna-doctor "
_LIMIT_S = 60.0
_TAIL_BYTES = 400
_NO_COMMAND = 127


class Questions(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a machine is asked; see ``gather_facts``."""

    name: str
    environ: dict[str, str]
    checkpoint_url: str
    facing: str


class Answer(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What it says; ``port``: on which it listens at ``facts.address``, 0 if it cannot."""

    facts: MachineFacts
    port: int = 0


@dataclass(frozen=True, kw_only=True)
class Surveyed:
    """What is known of the machines: facts of those that answered, findings about those that did not."""

    facts: tuple[MachineFacts, ...]
    silent: tuple[Finding, ...]


def survey(
    here: MachineFacts,
    lines: Sequence[HostLine],
    command: RemoteCommand,
    checkpoint_url: str,
    limit_s: float = _LIMIT_S,
) -> Surveyed:
    """Ask all machines at once.

    Args:
        here: this machine; the others must reach its ``address``.
        lines: the others.
        command: how they are reached; its header has the variables that a job would have there.
        checkpoint_url: where checkpoints go; empty for nowhere.
        limit_s: what a machine gets for each of its two answers.
    """
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        talks = [_Talk(command, line, folder / str(index)) for index, line in enumerate(lines)]
        for talk in talks:
            stack.callback(talk.close)
        listener = stack.enter_context(_listening(here.address))
        return _ask(here, talks, listener.getsockname()[1], checkpoint_url, limit_s)


def _ask(
    here: MachineFacts, talks: Sequence[_Talk], port: int, checkpoint_url: str, limit_s: float
) -> Surveyed:
    for talk in talks:
        environ, name = talk.environ, talk.line.name
        talk.say(Questions(name=name, environ=environ, checkpoint_url=checkpoint_url, facing=here.address))
    _hear(talks, limit_s)
    heard = [talk for talk in talks if talk.heard]
    answers = [_answer_of(talk, here.unix_s) for talk in heard]
    ends = [_end(here.name, here.address, port)]
    ends += [_end(one.facts.name, one.facts.address, one.port) for one in answers if one.port]
    for talk in heard:
        talk.say([end for end in ends if end.name != talk.line.name])
    _hear(heard, limit_s)
    return Surveyed(
        facts=tuple(_complete(one.facts, talk) for one, talk in zip(answers, heard, strict=True)),
        silent=tuple(_silence(talk, limit_s) for talk in talks if not talk.heard),
    )


def answer(environ: Mapping[str, str]) -> None:
    """The other side: asked on standard input, it answers on standard output.

    Raises:
        ConfigError: it is asked something else.
    """
    try:
        asked = msgspec.json.decode(sys.stdin.buffer.readline(), type=Questions)
        facts = gather_facts(
            asked.name,
            {**environ, **asked.environ},
            checkpoint_url=asked.checkpoint_url,
            facing=asked.facing,
        )
        with _listening("" if facts.listen_problem else facts.address) as listener:
            port = 0 if facts.listen_problem else listener.getsockname()[1]
            _tell(Answer(facts=facts, port=port))
            if line := sys.stdin.buffer.readline():
                _tell(reach(msgspec.json.decode(line, type=list[Reach])))
                sys.stdin.buffer.readline()  # until all have tried
    except msgspec.DecodeError as error:
        raise ConfigError(f"--from-launcher is for `varuna doctor --hosts`: {error}.") from error


class _Talk:
    """With one machine; what it writes to standard error is kept in a file."""

    def __init__(self, command: RemoteCommand, line: HostLine, errors: Path) -> None:
        self.line = line
        self.environ = command.header.environ
        self.heard: list[bytes] = []
        self.heard_unix_s = 0.0
        self._errors = errors
        with errors.open("wb") as stderr:
            self._process = subprocess.Popen(
                over_ssh(command, line, ["doctor", "--from-launcher"]),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                bufsize=0,
            )
        self._partial = b""
        self.is_open = True

    def fileno(self) -> int:
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def say(self, message: Struct | Sequence[Struct]) -> None:
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(msgspec.json.encode(message) + b"\n")
        except BrokenPipeError:  # it has ended; its standard error says why
            self.is_open = False

    def pump(self) -> None:
        """Take in what has come."""
        data = os.read(self.fileno(), 1 << 16)
        self.is_open = bool(data)
        *lines, self._partial = (self._partial + data).split(b"\n")
        for line in lines:
            if line.startswith(_MARK):
                self.heard.append(line.removeprefix(_MARK))
                self.heard_unix_s = time.time()

    def exit_code(self) -> int | None:
        """Of ssh; None if it runs, as it does not long after its output has ended."""
        try:
            return self._process.wait(0 if self.is_open else 5)
        except subprocess.TimeoutExpired:
            return None

    def errors(self) -> str:
        """What it wrote last to standard error, in one line."""
        return " ".join(self._errors.read_bytes()[-_TAIL_BYTES:].decode(errors="replace").split())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.stdout.close()
        try:
            self._process.wait(2)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _hear(talks: Sequence[_Talk], limit_s: float) -> None:
    """Until each has said one thing more, has ended, or has had its time."""
    give_up_s = time.monotonic() + limit_s
    wanted = {talk.line.name: len(talk.heard) + 1 for talk in talks}
    with selectors.DefaultSelector() as selector:
        waiting = [talk for talk in talks if talk.is_open]
        for talk in waiting:
            selector.register(talk, selectors.EVENT_READ, talk)
        while waiting and (left_s := give_up_s - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                spoke: _Talk = key.data
                spoke.pump()
                if not spoke.is_open or len(spoke.heard) >= wanted[spoke.line.name]:
                    selector.unregister(spoke)
                    waiting.remove(spoke)


def _answer_of(talk: _Talk, here_unix_s: float) -> Answer:
    """Its answer, with the clock as it would have been when this machine looked at its own."""
    found = msgspec.json.decode(talk.heard[0], type=Answer)
    ahead_s = found.facts.unix_s - talk.heard_unix_s
    return msgspec.structs.replace(
        found, facts=msgspec.structs.replace(found.facts, unix_s=here_unix_s + ahead_s)
    )


def _complete(facts: MachineFacts, talk: _Talk) -> MachineFacts:
    if len(talk.heard) < 2:
        return facts
    return msgspec.structs.replace(facts, reached=msgspec.json.decode(talk.heard[1], type=tuple[Reach, ...]))


def _silence(talk: _Talk, limit_s: float) -> Finding:
    """Why a machine has not answered."""
    code, errors = talk.exit_code(), talk.errors()
    name = talk.line.destination
    if code is None:
        found, mend = f"no answer within {limit_s:g} s", f"Look there: ssh {name}"
    elif code == UNREACHABLE:
        found = f"cannot be reached: {errors or 'ssh does not say why'}"
        mend = f"This must work without a question: ssh -o BatchMode=yes {name} true"
    else:
        found = f"`varuna doctor` cannot run there (exit code {code}): {errors}"
        mend = (
            "It needs the folder in which you are now, this Python and varuna at the same paths; "
            "VARUNA_REMOTE_PYTHON names another Python."
        )
    return Finding(machine=talk.line.name, check="ssh", level="stops", found=found, mend=mend)


def _end(name: str, address: str, port: int) -> Reach:
    return Reach(name=name, address=f"{address} {port}")


def _listening(address: str) -> socket.socket:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    return socket.create_server((address or "127.0.0.1", 0), family=family)


def _tell(message: Struct | Sequence[Struct]) -> None:
    sys.stdout.buffer.write(_MARK + msgspec.json.encode(message) + b"\n")
    sys.stdout.buffer.flush()
