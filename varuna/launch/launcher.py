"""What every launcher does for the workers of its machine, whoever decides which there are.

This process has no torch and does no work: it waits for reports, asks the ``Supervisor`` what follows, and does
that. Whatever way it leaves, the control socket closes with it and the zygote ends everything.
"""

from __future__ import annotations

import os
import selectors
import signal
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping

import msgspec

from varuna.failure import FailureRecord, read_record, record_path
from varuna.launch.agent import Agent
from varuna.launch.job import LocalJob, WorkerPlace, worker_environ
from varuna.launch.manager import MANAGER_NAME
from varuna.launch.notice_watch import check_environ
from varuna.launch.notices import MachineNotices
from varuna.launch.output import Output, PrefixedStream, say
from varuna.launch.protocol import Exited, Ready, SendSignal, Started, StartProcess, StoreReady, WorkerNotice
from varuna.launch.report import describe_end, failure_report
from varuna.launch.signals import SignalInbox
from varuna.launch.supervise import Supervisor, WorkerEnd
from varuna.launch.timing import StartTiming
from varuna.launch.zygote_process import ZygoteProcess
from varuna.morph.notices import Told
from varuna.morph.notices_signal import Grace

STORE_NAME = "store"
SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
_NOTICE_BYTES = 65536
_SHOW_CURSOR = "\x1b[?25h"  # a progress line that was killed may have hidden it


class Launcher(ABC):
    """The shell around the ``Supervisor``: descriptors in, instructions out.

    Args:
        job: what workers run.
        environ: what they find in their environment, besides their place.
        inbox: signals to this process.
        supervisor: when the job is over, and what must be signalled.
        token: the job's.

    Raises:
        ConfigError: a variable that cannot be.
    """

    def __init__(
        self, job: LocalJob, environ: Mapping[str, str], inbox: SignalInbox, supervisor: Supervisor, token: str
    ) -> None:
        check_environ(environ)
        self.job = job
        self.environ = environ
        self.supervisor = supervisor
        self.token = token
        self.agent: Agent | None = None
        self.notices: MachineNotices | None = None
        self.store: StoreReady | None = None
        self.grace = Grace.from_env(environ)
        self.timing = StartTiming(time.monotonic(), job.num_workers)
        self._inbox = inbox
        self._num_workers = 0  # ever started or to be started
        self._places: dict[int, WorkerPlace] = {}  # of living workers
        self._fenced: set[int] = set()  # workers that the manager had killed
        self._output = Output(job.log_dir, "all" if job.show_all else "first")
        self.selector = selectors.DefaultSelector()
        self.zygote = ZygoteProcess(environ, job.num_workers)
        self._notices, self._notices_writer = os.pipe()
        self._ending, self._ending_writer = os.pipe()  # this end is the launcher's alone
        os.set_blocking(self._notices, False)
        self._partial_notice = b""
        self._told: dict[int, FailureRecord] = {}  # by workers that could not write it down

    # --- what differs between launchers -----------------------------------------------------

    @abstractmethod
    def zygote_ready(self) -> None:
        """The zygote has torch imported."""

    @abstractmethod
    def service_ready(self, report: StoreReady) -> None:
        """The store listens."""

    @abstractmethod
    def service_exited(self, report: Exited) -> None:
        """The store's or the manager's process has ended."""

    @abstractmethod
    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """A signal to this process."""

    @abstractmethod
    def obey(self, now_s: float) -> None:
        """Do what the manager asks."""

    @abstractmethod
    def environ_of(self, place: WorkerPlace) -> dict[str, str]:
        """What a worker has to know to take orders from the manager; nothing without one."""

    def on_time(self, now_s: float) -> float | None:
        """What follows from the time; seconds until it must be looked at again."""
        return self.supervisor.wait_s(now_s)

    # --- a job ------------------------------------------------------------------------------

    def run(self) -> int:
        """See the job through; returns its exit code."""
        for source in (self.zygote.channel.connection, self._notices, self._inbox):
            self.selector.register(source, selectors.EVENT_READ)
        if self.agent is not None:
            self.selector.register(self.agent, selectors.EVENT_READ)
        while not self.supervisor.is_done:
            self._send_due_signals()
            for key, _ in self.selector.select(self.on_time(time.monotonic())):
                if isinstance(key.data, PrefixedStream) and not key.data.pump():
                    self.selector.unregister(key.fd)
            now_s = time.monotonic()
            for signum in self._inbox.read():
                self.signalled(signum, now_s)
            self._read_notices()
            self._read_reports()
            self.obey(now_s)
        return self._finish()

    def close(self) -> None:
        """End the zygote and whatever is left of the job. Idempotent."""
        if self.notices is not None:
            self.notices.close()
        self.zygote.close()

    def _finish(self) -> int:
        self.close()
        self.selector.close()
        for fd in (self._notices, self._notices_writer, self._ending):
            os.close(fd)
        self._tell_ending()
        self._output.close()
        outcome = self.supervisor.outcome()
        report = failure_report(outcome, self._output.tail, self.job.log_dir)
        if report and sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        sys.stderr.write(report)
        sys.stderr.flush()
        return outcome.exit_code

    # --- what arrives -----------------------------------------------------------------------

    def _read_notices(self) -> None:
        try:
            data = os.read(self._notices, _NOTICE_BYTES)
        except BlockingIOError:
            return
        *lines, self._partial_notice = (self._partial_notice + data).split(b"\n")
        for line in lines:
            notice = msgspec.json.decode(line, type=WorkerNotice)
            if notice.what == "failed":
                if notice.record is not None:
                    self._told[notice.worker_index] = notice.record
                self._take_record(notice.worker_index)
            elif notice.what == "terminate":
                self._has_to_go(notice.worker_index)
            else:
                self.timing.worker_runs(notice.at_s)
                if self.timing.is_complete and self.environ.get("VARUNA_TIMING"):
                    say(self.timing.summary())

    def _read_reports(self) -> None:
        for report in self.zygote.reports():
            match report:
                case Ready():
                    self.timing.zygote_ready(time.monotonic(), report.import_s)
                    self.zygote_ready()
                case StoreReady():
                    self.timing.store_ready(time.monotonic())
                    self.service_ready(report)
                case Started():
                    if report.name not in (STORE_NAME, MANAGER_NAME):
                        self._started(_worker_index(report.name), report.pid)
                case Exited():
                    if report.name in (STORE_NAME, MANAGER_NAME):
                        self.service_exited(report)
                    else:
                        self._exited(report)
        if not self.zygote.channel.is_open and not self.supervisor.is_done:
            self.supervisor.zygote_lost(self.zygote.exit_code(), time.monotonic())

    def _started(self, worker_index: int, pid: int) -> None:
        self.supervisor.worker_started(worker_index)
        place = self._places.get(worker_index)
        if self.agent is not None and place is not None:
            rank = None if place.joins else place.rank
            self.agent.worker_started(worker_index, rank, attempt=place.attempt, pid=pid)

    def _exited(self, report: Exited) -> None:
        worker_index = _worker_index(report.name)
        self._places.pop(worker_index, None)
        self._read_notices()  # its last one may still be in the pipe
        record = self._take_record(worker_index)
        goes_on = self.supervisor.worker_exited(worker_index, report.code, report.at_s, time.monotonic())
        if self.agent is not None:
            failure, code = ("", report.code) if record is None else (record.summary(), record.exit_code)
            self.agent.worker_exited(worker_index, code, failure)
        if self.notices is not None:
            self.notices.worker_left(len(self._places))
        if goes_on and worker_index not in self._fenced:
            end = WorkerEnd(worker_index=worker_index, code=report.code, record=record)
            say(f"{describe_end(end)}; the others go on")

    def _take_record(self, worker_index: int) -> FailureRecord | None:
        """What a worker has left about its failure, or could only tell."""
        record = read_record(self.job.log_dir, worker_index) or self._told.get(worker_index)
        if record is not None and self.supervisor.worker_failed(record, time.monotonic()):
            self._output.append(worker_index, record.traceback_text)
        return record

    def _has_to_go(self, worker_index: int) -> None:
        """Somebody sent a worker SIGTERM, and will send SIGKILL."""
        if self.agent is not None and worker_index in self._places and not self.supervisor.is_ending:
            self.agent.worker_has_to_go(worker_index, self.grace.sigterm_s, "SIGTERM")

    # --- what is done -----------------------------------------------------------------------

    @property
    def living(self) -> list[int]:
        """Workers that run, or are about to."""
        return sorted(self._places)

    def hear(self, told: Told) -> None:
        """What a cloud says about this machine."""
        if self.notices is not None:
            self.notices.hear(told, len(self._places))

    def start_newcomers(self, count: int) -> None:
        """Start workers that join the job, unless this machine goes away."""
        if self.notices is not None and self.notices.is_going:
            say("no worker is started on a machine that goes away")
            return
        for _ in range(count):
            place = WorkerPlace.newcomer(self._num_workers, self.free_local_rank(), self.job.num_workers)
            if self.store is None or not self.supervisor.worker_added(place.worker_index):
                return
            self.start_worker(place)

    def free_local_rank(self) -> int:
        """The lowest that no living worker has."""
        taken = {place.local_rank for place in self._places.values()}
        return next(rank for rank in range(len(taken) + 1) if rank not in taken)

    def next_index(self, wanted: int) -> int:
        """A number that no worker here has had: ``wanted`` if it can be."""
        return max(wanted, self._num_workers)

    def stop_worker(self, worker_index: int | None) -> None:
        """Kill a worker that was fenced."""
        if worker_index is not None and worker_index in self._places and worker_index not in self._fenced:
            self._fenced.add(worker_index)
            say(f"worker {worker_index} does not answer and is killed; the others go on")
            name = _worker_name(worker_index)
            self.zygote.channel.send(SendSignal(name=name, signum=signal.SIGKILL, with_children=True))

    def start_worker(self, place: WorkerPlace) -> None:
        """Start a worker that the supervisor knows of."""
        job, worker_index = self.job, place.worker_index
        assert self.store is not None
        self._num_workers = max(self._num_workers, worker_index + 1)
        self._places[worker_index] = place
        record_path(job.log_dir, worker_index).unlink(missing_ok=True)
        from_manager = self.environ_of(place)
        is_first = place.rank == 0 and not place.joins
        terminal = self._output.terminal_for(is_first) if from_manager else ()
        streams = self._output.streams_for(worker_index, is_first)
        fds = (streams.stdin, streams.stdout, streams.stderr, self._notices_writer, self._ending, *terminal)
        request = StartProcess(
            name=_worker_name(worker_index),
            worker_index=worker_index,
            target=job.target,
            is_module=job.is_module,
            arguments=list(job.arguments),
            environ=worker_environ(job, place, self.store, self.token) | from_manager,
            failure_dir=str(job.log_dir),
            num_fds=len(fds),
        )
        self.zygote.channel.send(request, fds)
        streams.close()
        for pipe in self._output.new_pipes():
            self.selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def _send_due_signals(self) -> None:
        due_signals = self.supervisor.due_signals(time.monotonic())
        if due_signals:
            self._tell_ending()
        for due in due_signals:
            everything = due.signum == signal.SIGKILL
            name = _worker_name(due.worker_index)
            self.zygote.channel.send(SendSignal(name=name, signum=due.signum, with_children=everything))

    def _tell_ending(self) -> None:
        """From now on workers take SIGTERM for what it usually means."""
        if self._ending_writer >= 0:
            os.close(self._ending_writer)
            self._ending_writer = -1


def _worker_name(worker_index: int) -> str:
    return f"worker-{worker_index}"


def _worker_index(name: str) -> int:
    return int(name.removeprefix("worker-"))
