"""``varuna manager``: the manager of a job of many machines, and the store in which its first workers meet.

No worker runs here. What the manager knows is in a directory: started again with the same one, wherever it was
interrupted, it goes on at the same address, and agents and workers find it again. It goes on on another
machine, too, if they were told of the file in the directory that has its URL. It ends when the job does.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import msgspec

from varuna.config import MorphConfig
from varuna.errors import ConfigError
from varuna.launch.launcher import SIGNALS, STORE_NAME
from varuna.launch.manager import ANY_ADDRESS, BACKLOG, ManyMachines
from varuna.launch.morphing import Morphing
from varuna.launch.naming import new_run_id
from varuna.launch.output import PrefixedStream, say
from varuna.launch.processes import adopt_orphans
from varuna.launch.protocol import Exited, Ready, StartStore
from varuna.launch.signals import SignalInbox
from varuna.launch.token import VARIABLE, keep_token
from varuna.launch.zygote_process import ZygoteProcess
from varuna.morph.messages import JobEnded
from varuna.morph.whereabouts import URL_NAME
from varuna.versions import Versions, installed_versions, refusal_of_versions

TOKEN_NAME = "token"
RECORD_NAME = "manager.json"
_LOCK_NAME = "lock"
_LOCK_S = 0.2
_LOCK_PATIENCE_S = 3.0
"""What is left of a manager that was killed just now may need a moment to go."""

LINGER_S = 1.5
"""Agents that were just away can still hear how the job has ended."""


@dataclass(frozen=True, kw_only=True)
class ManagerSettings:
    """How to manage a job.

    Attributes:
        host, port: to listen on; port 0: any at first, then the same again.
        state_dir: what is known is kept there, with the token.
        min_workers, settle_s: when the job is founded; see ``Policy``.
        morph: limits.
        stays: when the job is over, until a signal comes, for agents that come late.
    """

    host: str
    port: int
    state_dir: Path
    min_workers: int
    settle_s: float
    morph: MorphConfig
    stays: bool = False


class HostRecord(msgspec.Struct, frozen=True, kw_only=True):
    """What a manager that is started again must not change."""

    run_id: str
    host: str
    port: int
    store_port: int
    min_workers: int
    settle_s: float
    versions: Versions


def run_manager(settings: ManagerSettings, environ: Mapping[str, str]) -> int:
    """Manage a job to its end; returns its exit code. From the main thread only.

    Raises:
        ConfigError: the directory or the address cannot be used, or belongs to a manager that lives.
    """
    return run_host(
        settings.state_dir, environ, lambda token, inbox: ManagerHost(settings, token, environ, inbox)
    )


def run_host(
    state_dir: Path, environ: Mapping[str, str], make: Callable[[str, SignalInbox], ManagerHost]
) -> int:
    """Run what ``make`` makes of the job's token and the signals, to its end; raises as ``run_manager``."""
    adopt_orphans()
    state_dir.mkdir(mode=0o700, parents=True, exist_ok=True)
    with locked(state_dir), SignalInbox(SIGNALS) as inbox:
        host = make(keep_token(environ, state_dir / TOKEN_NAME), inbox)
        try:
            return host.run()
        finally:
            host.close()


class ManagerHost:
    """The shell around the manager's and the store's process."""

    def __init__(
        self, settings: ManagerSettings, token: str, environ: Mapping[str, str], inbox: SignalInbox
    ) -> None:
        self.settings = settings
        self._inbox = inbox
        record = _recorded(settings)
        again = record if record is not None and record.host == settings.host else None  # else: another machine
        self._listener = _listen(settings.host, settings.port or (again.port if again else 0))
        self._store_listener = _listen(settings.host, again.store_port if again else 0)
        self._record = self._keep(record)
        _write(settings.state_dir / URL_NAME, f"{self.url}\n".encode())
        self._says_token = not environ.get(VARIABLE)
        self._zygote = ZygoteProcess(environ, num_workers=2)
        self._morphing: Morphing | None = Morphing(
            settings.morph,
            run_id=self._record.run_id,
            token=token,
            environ=environ,
            log_dir=settings.state_dir,
            many=ManyMachines(
                listener=self._listener,
                run_id=self._record.run_id,
                store_port=self._record.store_port,
                min_workers=self._record.min_workers,
                settle_s=self._record.settle_s,
            ),
        )
        self._morphing.agent.offer(0)
        self.selector = selectors.DefaultSelector()
        self.exit_code: int | None = None
        self._ends_s = float("inf")

    def run(self) -> int:
        """Until the job is over, or a signal comes; returns the exit code."""
        assert self._morphing is not None
        self.greet()
        for source in (self._zygote.channel.connection, self._inbox, self._morphing.agent):
            self.selector.register(source, selectors.EVENT_READ)
        while True:
            now_s = time.monotonic()
            self._morphing.watch_manager(self._zygote.channel, now_s)
            wait_s = min(self._morphing.watch_s, self.on_time(now_s))
            if self.exit_code is not None and now_s >= self._ends_s:
                return self.exit_code
            if self.exit_code is not None:
                wait_s = min(wait_s, self._ends_s - now_s)
            for key, _ in self.selector.select(wait_s):
                if isinstance(key.data, PrefixedStream) and not key.data.pump():
                    self.selector.unregister(key.fd)
            now_s = time.monotonic()
            for signum in self._inbox.read():
                self.signalled(signum, now_s)
            if lost := self._read_reports(now_s):
                say(lost)
                self.end(1, now_s)
            self._read_orders(now_s)

    def end(self, code: int, at_s: float) -> None:
        """Return ``code`` from ``run`` at that time; whoever says so first decides the code."""
        self.exit_code = code if self.exit_code is None else self.exit_code
        self._ends_s = min(self._ends_s, at_s)

    def on_time(self, _: float) -> float:
        """What follows from the time; seconds until it must be looked at again."""
        return float("inf")

    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """A signal to this process."""
        again = f" Training goes on without it; start it again with --state {self.settings.state_dir}"
        say(f"{signum.name}: the manager ends.{again if self.exit_code is None else ''}")
        self.end(128 + signum, now_s)

    def close(self) -> None:
        """End manager and store. Idempotent."""
        if self._morphing is not None:
            self._morphing.close()
            self._morphing = None
        self._zygote.close()
        self._store_listener.close()
        self.selector.close()

    @property
    def url(self) -> str:
        """Where the manager is."""
        record = self._record
        host = socket.gethostname() if record.host == ANY_ADDRESS else record.host
        return f"http://{host}:{record.port}"

    def greet(self) -> None:
        """Tell people where it is, and how to take part."""
        record, url = self._record, self.url
        token = self.settings.state_dir / TOKEN_NAME
        where = f"the token is in {token}" if self._says_token else f"the token is the one in {VARIABLE}"
        say(f"run {record.run_id} is managed at {url}; {where}")
        flags = " --token-file TOKEN" if self._says_token else ""
        command = f"varuna agent --manager {url}{flags} train.py"
        workers = "1 worker" if record.min_workers == 1 else f"{record.min_workers} workers"
        say(f"it begins with {workers}; machines take part, then or later, by: {command}")

    def _read_reports(self, now_s: float) -> str:
        """What the zygote tells; why nothing can go on, if so."""
        assert self._morphing is not None
        for report in self._zygote.reports():
            match report:
                case Ready():
                    self._morphing.start_manager(self._zygote.channel)
                    self._start_store()
                case Exited(name=name) if name == STORE_NAME:
                    say("the process that hosts the first workers' store has ended and is started again")
                    self._start_store()
                case Exited():
                    if lost := self._morphing.manager_exited(report.code, self._zygote.channel, now_s):
                        return lost
                case _:
                    pass  # that it was started, or that the store listens
        if not self._zygote.channel.is_open:
            return f"the process that starts the manager has ended with code {self._zygote.exit_code()}."
        return ""

    def _start_store(self) -> None:
        request = StartStore(host=self.settings.host, num_fds=1)
        self._zygote.channel.send(request, [self._store_listener.fileno()])

    def _read_orders(self, now_s: float) -> None:
        assert self._morphing is not None
        for order in self._morphing.agent.orders():
            if isinstance(order, JobEnded) and self.exit_code is None:
                say(f"the job has failed: {order.failure}" if order.failure else "the job is done")
                self.end(order.code, float("inf") if self.settings.stays else now_s + LINGER_S)

    def _keep(self, known: HostRecord | None) -> HostRecord:
        settings = self.settings
        record = HostRecord(
            run_id=known.run_id if known else new_run_id("job"),
            host=settings.host,
            port=self._listener.getsockname()[1],
            store_port=self._store_listener.getsockname()[1],
            min_workers=settings.min_workers,
            settle_s=settings.settle_s,
            versions=installed_versions(),
        )
        _write(settings.state_dir / RECORD_NAME, msgspec.json.encode(record))
        return record


def _write(path: Path, data: bytes) -> None:
    """A whole file, or none."""
    temporary = path.with_suffix(".part")
    temporary.write_bytes(data)
    temporary.replace(path)


def _recorded(settings: ManagerSettings) -> HostRecord | None:
    """What an earlier manager has kept in the directory."""
    path = settings.state_dir / RECORD_NAME
    if not path.exists():
        return None
    try:
        record = msgspec.json.decode(path.read_bytes(), type=HostRecord)
    except msgspec.DecodeError as error:
        raise ConfigError(
            f"{path} cannot be read: {error}. Give another --state to begin a new job."
        ) from error
    was, now = (record.min_workers, record.settle_s), (settings.min_workers, settings.settle_s)
    if was != now:
        raise ConfigError(
            f"The job in {settings.state_dir} was begun with --min-workers {was[0]} --settle {was[1]:g}; give "
            f"the same again, or another --state to begin a new job."
        )
    if refusal := refusal_of_versions(installed_versions(), record.versions):
        raise ConfigError(f"The job in {settings.state_dir} cannot be managed by this machine: {refusal}")
    return record


def _listen(host: str, port: int) -> socket.socket:
    try:
        return socket.create_server((host, port), backlog=BACKLOG)
    except OSError as error:
        raise ConfigError(
            f"The manager cannot listen on {host}:{port}: {error}. Give --listen an address of this machine "
            f"and a free port."
        ) from error


@contextlib.contextmanager
def locked(state_dir: Path, patience_s: float = _LOCK_PATIENCE_S) -> Iterator[None]:
    """One manager at a time; of one that was lost with its machine, a file server may need time to be sure."""
    give_up_s = time.monotonic() + patience_s
    descriptor = os.open(state_dir / _LOCK_NAME, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        while not _lock(descriptor):
            if time.monotonic() >= give_up_s:
                raise ConfigError(f"A manager is at work in {state_dir}. Give another --state.")
            time.sleep(_LOCK_S)
        yield
    finally:
        os.close(descriptor)


def _lock(descriptor: int) -> bool:
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    return True
