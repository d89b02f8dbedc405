"""Replays a fleet's trace against a real job on this machine: workers come and go as its machines did.

    from varuna.plan.fleet import FleetOptions
    from varuna.plan.fleet_trace import read_trace
    from varuna.testing.replay import replay
    from varuna.testing.replay_schedule import scaled

    trace = scaled(read_trace(Path("fleet.csv")), max_workers=4, speed=60)
    result = replay(trace, ["--stages", "2", "train.py"], FleetOptions(notice_s=2, sudden_share=0.1))
    assert result.goodput > 0.9

Time begins when the job's first generation runs. The job is ended with the trace; one whose script ends sooner
is measured up to there. Times of the trace are the job's own seconds: make it quicker with ``scaled``.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path

from varuna.config import cache_dir
from varuna.errors import ConfigError, RunError
from varuna.launch.processes import die_with_parent
from varuna.morph.client import RunClient
from varuna.morph.runs import living_runs
from varuna.morph.views import LoggedEvent, WorkerState
from varuna.plan.fleet import FleetOptions, fleet_events
from varuna.plan.fleet_trace import FleetChange, FleetTrace
from varuna.testing.replay_account import ReplayResult, account, seconds_of
from varuna.testing.replay_schedule import counts_of, num_at_start

_POLL_S = 0.05
_LOOK_S = 1.0
_END_S = 15.0
_INTERRUPTED = 128 + signal.SIGINT

Say = Callable[[str], None]


def replay(
    trace: FleetTrace,
    arguments: Sequence[str],
    options: FleetOptions,
    *,
    cwd: Path | None = None,
    environ: Mapping[str, str] | None = None,
    start_s: float = 120.0,
    say: Say = lambda _: None,
) -> ReplayResult:
    """Run ``varuna run ARGUMENTS`` on as many workers as the trace has machines.

    Args:
        trace: who is there when, in the job's seconds; two workers or more at its beginning.
        arguments: of ``varuna run`` but for ``--workers``: options, script, its own arguments.
        options: ``notice_s`` (0: workers are killed without), ``sudden_share`` of those that get no notice, and
            ``seed`` of who that is; the rest is for ``replay_fleet``, which can be asked the same.
        cwd: of the job; by default that of this process.
        environ: of the job; by default that of this process.
        start_s: how long it may take to its first generation.
        say: told what is done, a line each.

    Raises:
        ConfigError: the trace begins with fewer than two workers.
        RunError: the job failed, or did not start.
    """
    num_workers = num_at_start(trace)
    if num_workers < 2:
        raise ConfigError(
            f"{trace.name} begins with {num_workers} workers, and a job in which workers come and go needs two "
            f"or more. Begin later in the trace, or with more workers."
        )
    environ = dict(os.environ if environ is None else environ)
    command = [sys.executable, "-m", "varuna", "run", "--workers", str(num_workers), "--morph", *arguments]
    process = subprocess.Popen(
        command,
        cwd=cwd,
        env=environ,
        stdin=subprocess.DEVNULL,
        preexec_fn=lambda: die_with_parent(signal.SIGTERM),  # noqa: PLW1509
    )
    try:
        job = _Job(process, cache_dir(environ), num_workers, say)
        job.wait_until_running(start_s)
        for time_s, event in fleet_events(trace, options):
            if time_s >= trace.end_s or not job.wait_until(time_s):
                break
            if isinstance(event, str):
                job.notice(event, options.notice_s)
            elif time_s > 0:
                job.change(event)
        job.wait_until(trace.end_s)
        return job.finish(trace)
    finally:
        _end(process)


class _Job:
    """One job at work, and which of its workers is which machine."""

    def __init__(self, process: subprocess.Popen[bytes], cache: Path, num_workers: int, say: Say) -> None:
        self._process = process
        self._cache = cache
        self._say = say
        self._workers = {f"machine-{index}": index for index in range(num_workers)}
        self._num_started = num_workers
        self._client: RunClient | None = None
        self._events: list[LoggedEvent] = []
        self._began_s = 0.0
        self._batch_size = 0

    @property
    def client(self) -> RunClient:
        """Of its manager."""
        assert self._client is not None
        return self._client

    # --- time -------------------------------------------------------------------------------

    def wait_until_running(self, timeout_s: float) -> None:
        """Until the first generation is at work; with that the replay begins."""
        until_s = time.monotonic() + timeout_s
        while not self._is_running():
            if not self._is_alive(_POLL_S):
                raise RunError(f"The job ended with code {self._process.returncode} before its first step.")
            if time.monotonic() > until_s:
                raise RunError(f"The job has not come to its first step in {timeout_s:g} s.")
        first = next(index for index, event in enumerate(self._events) if event.kind == "running")
        self._events = self._events[first:]
        self._began_s = seconds_of(self._events[0])
        plan = self.client.status().plan
        assert plan is not None
        self._batch_size = plan.batch_size

    def wait_until(self, time_s: float) -> bool:
        """Until so many seconds of the replay have passed; False if the job ended before."""
        while (left_s := time_s - self._now_s()) > 0:
            if not self._is_alive(min(left_s, _LOOK_S)):
                return False
            self._look()
        return True

    def _now_s(self) -> float:
        return datetime.now(UTC).timestamp() - self._began_s

    def _is_alive(self, wait_s: float) -> bool:
        try:
            self._process.wait(wait_s)
        except subprocess.TimeoutExpired:
            return True
        return False

    def _is_running(self) -> bool:
        if self._client is None:
            for run in living_runs(self._cache):
                if run.pid == self._process.pid:
                    self._client = RunClient(run, self._cache)
        if self._client is None:
            return False
        self._look()
        return any(event.kind == "running" for event in self._events)

    def _look(self) -> None:
        """Read what is new. A manager that was started again counts from 1 again."""
        newest = self._events[-1] if self._events else None
        try:
            after = 0 if newest is None else newest.number - 1
            new = list(self.client.events(after=after))
            if newest is not None:
                new = new[1:] if new[:1] == [newest] else list(self.client.events())
        except ConfigError:  # the job, or its manager, is just coming or going
            return
        self._events += new

    # --- machines ---------------------------------------------------------------------------

    def notice(self, machine: str, notice_s: float) -> None:
        """A machine will go: its worker is told."""
        worker = self._worker_of(machine)
        if worker is not None:
            self._say(f"{self._now_s():6.1f} s: worker {self._workers[machine]} has {notice_s:g} s left")
            try:
                self.client.preempt(worker.incarnation, notice_s)
            except ConfigError:
                if self._worker_of(machine) is not None:  # it has not just ended by itself
                    raise

    def change(self, change: FleetChange) -> None:
        """Machines go and come."""
        for machine in change.removed:
            worker = self._worker_of(machine)
            if worker is not None and worker.pid:
                self._say(f"{self._now_s():6.1f} s: worker {self._workers[machine]} is killed")
                _kill(worker.pid)
        if change.added:
            self._say(f"{self._now_s():6.1f} s: {len(change.added)} more")
            self.client.add_workers(len(change.added))
        for machine in change.added:
            self._workers[machine] = self._num_started
            self._num_started += 1

    def _worker_of(self, machine: str) -> WorkerState | None:
        """The worker on a machine; None if it has left already, or has not been heard of."""
        number = str(self._workers[machine])
        for worker in self.client.status().workers:
            if worker.incarnation.rsplit(".", 2)[1] == number and worker.status != "gone":
                return worker
        return None

    # --- the end ----------------------------------------------------------------------------

    def finish(self, trace: FleetTrace) -> ReplayResult:
        """End the job and count."""
        duration_s = min(self._now_s(), trace.end_s)
        if self._is_alive(0):
            self._look()
        elif self._process.returncode != 0:
            raise RunError(
                f"The job failed after {duration_s:.1f} s of the replay, with code {self._process.returncode}; "
                f"see what it says above."
            )
        else:
            duration_s = seconds_of(self._events[-1]) - self._began_s
        _end(self._process)
        if self._process.returncode not in (0, _INTERRUPTED):
            raise RunError(f"The job did not end as it was asked to, but with code {self._process.returncode}.")
        counts = tuple(pair for pair in counts_of(trace) if pair[0] < duration_s)
        return account(trace.name, self._events, counts, duration_s=duration_s, batch_size=self._batch_size)


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return  # it has just ended by itself


def _end(process: subprocess.Popen[bytes]) -> None:
    """As Ctrl-C does; idempotent."""
    if process.poll() is None:
        process.send_signal(signal.SIGINT)
    try:
        process.wait(_END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
