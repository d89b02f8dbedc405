"""``varuna run --hosts FILE``: a manager here, and an agent on every machine of the file, over OpenSSH.

The file is watched: a line more is a machine more, a line less is a notice to that machine. A machine that
cannot be reached, or whose connection breaks, is tried again for as long as its line is there. The job, and
this command, end when the manager says so.
"""

from __future__ import annotations

import selectors
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

from varuna.errors import ConfigError
from varuna.launch.host import TOKEN_NAME, ManagerHost, ManagerSettings, locked
from varuna.launch.hosts import HostLine, changes, read_hosts
from varuna.launch.launcher import SIGNALS
from varuna.launch.output import say
from varuna.launch.processes import adopt_orphans
from varuna.launch.remote import UNREACHABLE, RemoteCommand, RemoteMachine
from varuna.launch.signals import SignalInbox
from varuna.launch.token import keep_token

_LOOK_S = 0.5
_RETRY_S = (2.0, 5.0, 10.0, 30.0, 60.0)
"""Waits before a machine that was not reached is tried again; the last one is repeated."""

_END_S = 10.0
"""When the job is over, or is stopped, agents get so long to end."""


@dataclass(frozen=True, kw_only=True)
class FleetJob:
    """A job on the machines of a file.

    Attributes:
        hosts: the file.
        settings: of the manager.
        command: what runs on each machine; its header has no token yet, its ``agent`` no manager.
    """

    hosts: Path
    settings: ManagerSettings
    command: RemoteCommand


def run_fleet(job: FleetJob, environ: Mapping[str, str]) -> int:
    """Run a job to its end; returns its exit code. From the main thread only.

    Raises:
        ConfigError: the file cannot be read, or is empty; what ``run_manager`` raises.
    """
    hosts_in(job.hosts)
    adopt_orphans()
    state_dir = job.settings.state_dir
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(state_dir), SignalInbox(SIGNALS) as inbox:
        token = keep_token(environ, state_dir / TOKEN_NAME)
        fleet = _Fleet(job, token, environ, inbox)
        try:
            return fleet.run()
        finally:
            fleet.close()


@dataclass
class _Trouble:
    """A machine that was not reached."""

    num_tries: int = 0
    next_s: float = 0.0


@dataclass
class _Watched:
    """The file as it was read last."""

    stamp: tuple[int, int] = (0, 0)
    lines: tuple[HostLine, ...] = ()
    problem: str = ""
    troubles: dict[str, _Trouble] = field(default_factory=dict)


class _Fleet(ManagerHost):
    """The manager's host that also has machines started and told to leave."""

    def __init__(self, job: FleetJob, token: str, environ: Mapping[str, str], inbox: SignalInbox) -> None:
        super().__init__(job.settings, token, environ, inbox)
        self._hosts = job.hosts
        header = replace_token(job.command, token)
        self._command = replace(header, agent=("--manager", self.url, *job.command.agent))
        self._machines: dict[str, RemoteMachine] = {}
        self._file = _Watched()
        self._stop_s: float | None = None

    def greet(self) -> None:
        """See ``ManagerHost``."""
        say(f"machines are those in {self._hosts}; edit it while the job runs. Logs: {self.settings.state_dir}")

    def on_time(self, now_s: float) -> float:
        """See ``ManagerHost``."""
        self._look_at_ends(now_s)
        if self._stop_s is not None:
            if not self._machines or now_s >= self._stop_s:
                self.end(1, now_s)
        elif self.exit_code is None:
            self._look_at_file()
            self._follow_file(now_s)
        return _LOOK_S

    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """The first stops the job in good order, a second one does not wait."""
        if self._stop_s is not None:
            self.end(128 + signum, now_s)
            return
        say(f"{signum.name}: the job is stopped on all machines")
        self.end(128 + signum, now_s + _END_S)
        self._stop_s = now_s + _END_S
        for machine in self._machines.values():
            machine.tell("stop")

    def close(self) -> None:
        """See ``ManagerHost``."""
        give_up_s = time.monotonic() + (_END_S if self.exit_code is not None else 0.0)
        for machine in self._machines.values():
            machine.close(max(0.0, give_up_s - time.monotonic()))
        self._machines.clear()
        super().close()

    # --- the file ---------------------------------------------------------------------------

    def _look_at_file(self) -> None:
        """Read it if it has changed; one that cannot be read changes nothing."""
        try:
            status = self._hosts.stat()
            stamp = (status.st_mtime_ns, status.st_size)
            if stamp == self._file.stamp:
                return
            lines, problem = read_hosts_file(self._hosts), ""
        except (ConfigError, OSError) as error:
            stamp, lines, problem = (0, 0), self._file.lines, str(error)
        if problem and problem != self._file.problem:
            say(f"{problem} The machines stay as they are.")
        self._file.stamp, self._file.lines, self._file.problem = stamp, lines, problem

    def _follow_file(self, now_s: float) -> None:
        running = [name for name, machine in self._machines.items() if not machine.was_told]
        follows = changes(running, self._file.lines)
        for name in follows.removed:
            say(f"{name} is not in {self._hosts.name} any more and leaves the job")
            self._machines[name].tell("leave")
        for line in follows.added:
            trouble = self._file.troubles.get(line.name)
            if line.name not in self._machines and (trouble is None or now_s >= trouble.next_s):
                self._start(line)

    def _start(self, line: HostLine) -> None:
        machine = RemoteMachine(self._command, line, self.settings.state_dir)
        self._machines[line.name] = machine
        for stream in machine.streams:
            self.selector.register(stream.fd, selectors.EVENT_READ, stream)

    # --- machines that end ------------------------------------------------------------------

    def _look_at_ends(self, now_s: float) -> None:
        for name, machine in list(self._machines.items()):
            code = machine.exit_code()
            if code is None:
                continue
            for stream in machine.streams:
                if (stream.is_open and not stream.pump()) or stream.is_open:
                    self.selector.unregister(stream.fd)
            machine.close()
            del self._machines[name]
            if not machine.was_told and self.exit_code is None:
                self._ended_early(name, code, now_s)

    def _ended_early(self, name: str, code: int, now_s: float) -> None:
        trouble = self._file.troubles.setdefault(name, _Trouble())
        wait_s = _RETRY_S[min(trouble.num_tries, len(_RETRY_S) - 1)]
        trouble.num_tries += 1
        trouble.next_s = now_s + wait_s
        how = "cannot be reached" if code == UNREACHABLE else f"ended with exit code {code}"
        say(f"{name} {how}; it is tried again in {wait_s:g} s, as long as it is in {self._hosts.name}")


def replace_token(command: RemoteCommand, token: str) -> RemoteCommand:
    """The command with the job's token in its header."""
    header = command.header
    return replace(command, header=type(header)(token=token, environ=header.environ))


def hosts_in(path: Path) -> tuple[HostLine, ...]:
    """The machines with which a job begins.

    Raises:
        ConfigError: the file cannot be read, or is empty.
    """
    lines = read_hosts_file(path)
    if not lines:
        raise ConfigError(f"{path} has no machine in it.")
    return lines


def read_hosts_file(path: Path) -> tuple[HostLine, ...]:
    """The machines in a file. Raises ``ConfigError`` if it cannot be read."""
    try:
        return read_hosts(path.read_text(encoding="utf-8"), str(path))
    except (OSError, UnicodeError) as error:
        raise ConfigError(f"{path} cannot be read: {error}.") from error
