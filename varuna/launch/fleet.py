"""``varuna run --hosts FILE``: a manager here, and an agent on every machine of the file, over OpenSSH.

The file is watched: a line more is a machine more, a line less is a notice to that machine. A machine that
cannot be reached, or whose connection breaks, is tried again for as long as its line is there. The job, and
this command, end when the manager says so.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from varuna.errors import ConfigError
from varuna.launch.fleet_host import END_S, FleetHost
from varuna.launch.host import ManagerSettings, run_host
from varuna.launch.hosts import HostLine, changes, read_hosts
from varuna.launch.output import say
from varuna.launch.remote import UNREACHABLE, RemoteCommand, RemoteMachine
from varuna.launch.signals import SignalInbox


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
    return run_host(job.settings.state_dir, environ, lambda token, inbox: _Fleet(job, token, environ, inbox))


@dataclass
class _Watched:
    """The file as it was read last."""

    stamp: tuple[int, int] = (0, 0)
    lines: tuple[HostLine, ...] = ()
    problem: str = ""


class _Fleet(FleetHost):
    """The machines of a file."""

    look_s = 0.5
    places = "machines"

    def __init__(self, job: FleetJob, token: str, environ: Mapping[str, str], inbox: SignalInbox) -> None:
        super().__init__(job.settings, token, environ, inbox)
        self._hosts = job.hosts
        header = replace_token(job.command, token)
        self._command = replace(header, agent=("--manager", self.url, *job.command.agent))
        self._machines: dict[str, RemoteMachine] = {}
        self._file = _Watched()

    def greet(self) -> None:
        """See ``ManagerHost``."""
        say(f"machines are those in {self._hosts}; edit it while the job runs. Logs: {self.settings.state_dir}")

    @property
    def has_machines(self) -> bool:
        """See ``FleetHost``."""
        return bool(self._machines)

    def look_for_machines(self, now_s: float) -> None:
        """See ``FleetHost``."""
        self._look_at_file()
        self._follow_file(now_s)

    def stop_agents(self, now_s: float) -> None:
        """See ``FleetHost``."""
        for machine in self._machines.values():
            machine.tell("stop")

    def close(self) -> None:
        """See ``ManagerHost``."""
        give_up_s = time.monotonic() + (END_S if self.exit_code is not None else 0.0)
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
            if line.name not in self._machines and not self.retries.waits(line.name, now_s):
                self._start(line)

    def _start(self, line: HostLine) -> None:
        machine = RemoteMachine(self._command, line, self.settings.state_dir)
        self._machines[line.name] = machine
        for stream in machine.streams:
            self.selector.register(stream.fd, selectors.EVENT_READ, stream)

    # --- machines that end ------------------------------------------------------------------

    def look_at_agents(self, now_s: float) -> None:
        """See ``FleetHost``."""
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
        wait_s = self.retries.failed(name, now_s)
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
