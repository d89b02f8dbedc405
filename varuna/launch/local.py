"""A job on this machine: starts the zygote, has it fork the store and the workers, and sees the job to its end.

This process has no torch and does no work: it waits for reports, asks the ``Supervisor`` what follows, and does
that. Whatever way it leaves, the control socket closes with it and the zygote ends everything. If workers may
come and go (``LocalJob.morph``) it is also the agent of a manager that it starts (``morphing.py``).
"""

from __future__ import annotations

import os
import secrets
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping

import msgspec

from varuna.failure import FailureRecord, read_record, record_path
from varuna.launch.job import LocalJob, worker_environ
from varuna.launch.morphing import Morphing
from varuna.launch.output import Output, PrefixedStream, say
from varuna.launch.processes import adopt_orphans, kill_children, kill_group
from varuna.launch.protocol import (
    Exited,
    Ready,
    SendSignal,
    Started,
    StartProcess,
    StartStore,
    StoreReady,
    WorkerNotice,
    decode_report,
)
from varuna.launch.report import describe_end, failure_report
from varuna.launch.signals import SignalInbox
from varuna.launch.supervise import Supervisor, WorkerEnd
from varuna.launch.timing import StartTiming
from varuna.launch.zygote_process import start_zygote
from varuna.morph.messages import JobEnded, StartWorker, StopWorker

STORE_NAME = "store"
MANAGER_NAME = "manager"
_HOST = "127.0.0.1"
_ZYGOTE_EXIT_TIMEOUT_S = 1.0
_NOTICE_BYTES = 65536
_SHOW_CURSOR = "\x1b[?25h"  # a progress line that was killed may have hidden it


def run_local(job: LocalJob, environ: Mapping[str, str]) -> int:
    """Run a job to its end and return its exit code. From the main thread only: it takes signals meanwhile.

    Workers' output and, when the job fails, the report go to this process's standard output and error.
    """
    for worker_index in range(job.num_workers):
        record_path(job.log_dir, worker_index).unlink(missing_ok=True)
    adopt_orphans()
    with SignalInbox((signal.SIGINT, signal.SIGTERM, signal.SIGHUP)) as inbox:
        launcher = _Launcher(job, environ, inbox)
        try:
            return launcher.run()
        finally:
            launcher.close()


class _Launcher:
    """The shell around the ``Supervisor``: descriptors in, instructions out."""

    def __init__(self, job: LocalJob, environ: Mapping[str, str], inbox: SignalInbox) -> None:
        self._job = job
        self._environ = environ
        self._inbox = inbox
        self._timing = StartTiming(time.monotonic(), job.num_workers)
        self._supervisor = Supervisor(job.num_workers, is_managed=job.morph is not None)
        self._num_workers = job.num_workers  # ever started or to be started
        self._local_ranks: dict[int, int] = {}  # of living workers
        self._fenced: set[int] = set()  # workers that the manager had killed
        self._store: StoreReady | None = None
        self._output = Output(job.log_dir, "all" if job.show_all else "first")
        self._token = secrets.token_hex(16)
        self._group_ids: list[int] = []
        self._notices, self._notices_writer = os.pipe()
        os.set_blocking(self._notices, False)
        self._partial_notice = b""
        self._selector = selectors.DefaultSelector()
        self._zygote, self._channel = start_zygote(environ, job.num_workers)
        self._morphing: Morphing | None = None
        if job.morph is not None:
            self._morphing = Morphing(
                job.morph, run_id=job.run_id, token=self._token, environ=environ, log_dir=job.log_dir
            )
            self._selector.register(self._morphing.agent, selectors.EVENT_READ)

    def run(self) -> int:
        """See the job through; returns its exit code."""
        for source in (self._channel.connection, self._notices, self._inbox):
            self._selector.register(source, selectors.EVENT_READ)
        while not self._supervisor.is_done:
            self._send_due_signals()
            for key, _ in self._selector.select(self._supervisor.wait_s(time.monotonic())):
                if isinstance(key.data, PrefixedStream) and not key.data.pump():
                    self._selector.unregister(key.fd)
            self._read_signals()
            self._read_notices()
            self._read_reports()
            self._read_orders()
        return self._finish()

    def close(self) -> None:
        """End the zygote and whatever is left of the job. Idempotent."""
        if self._morphing is not None:
            self._morphing.close()
            self._morphing = None
        self._channel.close()
        try:
            self._zygote.wait(_ZYGOTE_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._zygote.kill()
            self._zygote.wait()
        if self._zygote.returncode != 0:  # it did not come to end what it had forked
            for group_id in self._group_ids:
                kill_group(group_id, signal.SIGKILL)
            self._group_ids.clear()
            kill_children()

    def _finish(self) -> int:
        self.close()
        self._selector.close()
        os.close(self._notices)
        os.close(self._notices_writer)
        self._output.close()
        outcome = self._supervisor.outcome()
        report = failure_report(outcome, self._output.tail, self._job.log_dir)
        if report and sys.stderr.isatty():
            sys.stderr.write(_SHOW_CURSOR)
        sys.stderr.write(report)
        sys.stderr.flush()
        return outcome.exit_code

    # --- what arrives -----------------------------------------------------------------------

    def _read_signals(self) -> None:
        for signum in self._inbox.read():
            self._supervisor.stop_requested(signum, time.monotonic())

    def _read_notices(self) -> None:
        try:
            data = os.read(self._notices, _NOTICE_BYTES)
        except BlockingIOError:
            return
        *lines, self._partial_notice = (self._partial_notice + data).split(b"\n")
        for line in lines:
            notice = msgspec.json.decode(line, type=WorkerNotice)
            if notice.is_failure:
                self._take_record(notice.worker_index)
            else:
                self._timing.worker_runs(notice.at_s)
                if self._timing.is_complete and self._environ.get("VARUNA_TIMING"):
                    say(self._timing.summary())

    def _read_reports(self) -> None:
        for line in self._channel.receive_lines():
            report = decode_report(line)
            match report:
                case Ready():
                    self._timing.zygote_ready(time.monotonic(), report.import_s)
                    if self._morphing is not None:
                        self._morphing.start_manager(self._channel)
                    self._channel.send(StartStore(host=_HOST))
                case StoreReady():
                    self._timing.store_ready(time.monotonic())
                    self._start_workers(report)
                case Started():
                    self._group_ids.append(report.pid)
                    if report.name not in (STORE_NAME, MANAGER_NAME):
                        self._started(_worker_index(report.name))
                case Exited():
                    self._exited(report)
        if not self._channel.is_open and not self._supervisor.is_done:
            self._zygote.wait()
            self._supervisor.zygote_lost(self._zygote.returncode, time.monotonic())

    def _read_orders(self) -> None:
        """What the manager asks of its agent here."""
        if self._morphing is None:
            return
        now_s = time.monotonic()
        for order in self._morphing.orders():
            match order:
                case StartWorker():
                    for _ in range(order.count):
                        self._start_newcomer()
                case StopWorker():
                    self._stop_worker(self._morphing.agent.worker_index_of(order.incarnation))
                case JobEnded():
                    if order.failure:
                        self._supervisor.job_failed(order.failure, now_s)

    def _stop_worker(self, worker_index: int | None) -> None:
        if worker_index is not None and worker_index in self._local_ranks:
            self._fenced.add(worker_index)
            say(f"worker {worker_index} does not answer and is killed; the others go on")
            name = _worker_name(worker_index)
            self._channel.send(SendSignal(name=name, signum=signal.SIGKILL, with_children=True))

    def _started(self, worker_index: int) -> None:
        self._supervisor.worker_started(worker_index)
        if self._morphing is not None:
            rank = worker_index if worker_index < self._job.num_workers else None
            self._morphing.agent.worker_started(worker_index, rank)

    def _exited(self, report: Exited) -> None:
        if report.name == STORE_NAME:
            self._supervisor.store_lost(time.monotonic())
            return
        if report.name == MANAGER_NAME:
            self._manager_exited(report)
            return
        worker_index = _worker_index(report.name)
        self._local_ranks.pop(worker_index, None)
        record = self._take_record(worker_index)  # its notice may still be in the pipe
        goes_on = self._supervisor.worker_exited(worker_index, report.code, report.at_s, time.monotonic())
        if self._morphing is not None:
            failure = "" if record is None else record.summary()
            self._morphing.agent.worker_exited(worker_index, report.code, failure)
        if goes_on and worker_index not in self._fenced:
            end = WorkerEnd(worker_index=worker_index, code=report.code, record=record)
            say(f"{describe_end(end)}; the others go on")

    def _manager_exited(self, report: Exited) -> None:
        if self._morphing is None or self._supervisor.is_ending:
            return
        now_s = time.monotonic()
        if lost := self._morphing.manager_exited(report.code, self._channel, now_s):
            say(lost)
            self._supervisor.manager_lost(lost, now_s)

    def _take_record(self, worker_index: int) -> FailureRecord | None:
        record = read_record(self._job.log_dir, worker_index)
        if record is not None and self._supervisor.worker_failed(record, time.monotonic()):
            self._output.append(worker_index, record.traceback_text)
        return record

    # --- what is done -----------------------------------------------------------------------

    def _start_workers(self, store: StoreReady) -> None:
        self._store = store
        for worker_index in range(self._job.num_workers):
            self._start_worker(worker_index, joins=False)

    def _start_newcomer(self) -> None:
        if self._store is not None and self._supervisor.worker_added(self._num_workers):
            record_path(self._job.log_dir, self._num_workers).unlink(missing_ok=True)
            self._start_worker(self._num_workers, joins=True)
            self._num_workers += 1

    def _start_worker(self, worker_index: int, *, joins: bool) -> None:
        job, store = self._job, self._store
        assert store is not None
        taken = set(self._local_ranks.values())
        local_rank = next(rank for rank in range(self._num_workers + 1) if rank not in taken)
        self._local_ranks[worker_index] = local_rank
        environ = worker_environ(job, worker_index, local_rank, store, self._token)
        terminal: tuple[int, ...] = ()
        if self._morphing is not None:
            environ |= self._morphing.environ_of(worker_index, joins=joins)
            terminal = self._output.terminal_for(worker_index)
        request = StartProcess(
            name=_worker_name(worker_index),
            worker_index=worker_index,
            target=job.target,
            is_module=job.is_module,
            arguments=list(job.arguments),
            environ=environ,
            failure_dir=str(job.log_dir),
            num_fds=4 + len(terminal),
        )
        streams = self._output.streams_for(worker_index)
        fds = (streams.stdin, streams.stdout, streams.stderr, self._notices_writer, *terminal)
        self._channel.send(request, fds)
        streams.close()
        for pipe in self._output.new_pipes():
            self._selector.register(pipe.fd, selectors.EVENT_READ, pipe)

    def _send_due_signals(self) -> None:
        for due in self._supervisor.due_signals(time.monotonic()):
            everything = due.signum == signal.SIGKILL
            name = _worker_name(due.worker_index)
            self._channel.send(SendSignal(name=name, signum=due.signum, with_children=everything))


def _worker_name(worker_index: int) -> str:
    return f"worker-{worker_index}"


def _worker_index(name: str) -> int:
    return int(name.removeprefix("worker-"))
