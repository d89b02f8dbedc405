"""When a job is over and what must be signalled: a state machine that is handed events and the time.

One worker's failure, a lost store or a request to stop begins the ending: the others get a moment to end by
themselves, then SIGTERM, then SIGKILL, all within ``MAX_ENDING_S``. A worker that ends well while others go on
changes nothing.

In a job that has a manager (``is_managed``) a worker that a signal ended changes nothing either, nor does a
newcomer that fails: the manager decides how the others go on, or that they cannot (``job_failed``). Such a job
has ended well if the last of its workers has. On one of several machines (``stays``) the job is over when the
manager says so (``job_ended``), or when this machine leaves it (``leave``).
"""

from __future__ import annotations

import signal
from dataclasses import dataclass

from varuna.failure import FailureRecord

MAX_ENDING_S = 4.0

_HEALED_S = 60.0
"""After a death, a job that still works has found how to go on."""


@dataclass(frozen=True, kw_only=True)
class Escalation:
    """One step of an ending: ``after_s`` seconds after it began, every worker alive gets ``signum``."""

    after_s: float
    signum: signal.Signals


_AFTER_FAILURE = (
    Escalation(after_s=1.5, signum=signal.SIGTERM),
    Escalation(after_s=3.0, signum=signal.SIGKILL),
)
_AFTER_INTERRUPT = (
    Escalation(after_s=0.0, signum=signal.SIGINT),
    Escalation(after_s=2.0, signum=signal.SIGTERM),
    Escalation(after_s=3.5, signum=signal.SIGKILL),
)
_AFTER_TERMINATE = (
    Escalation(after_s=0.0, signum=signal.SIGTERM),
    Escalation(after_s=3.5, signum=signal.SIGKILL),
)
_AT_ONCE = (Escalation(after_s=0.0, signum=signal.SIGKILL),)


@dataclass(frozen=True, kw_only=True)
class WorkerSignal:
    """An instruction: send this signal to this worker; SIGKILL goes to all that it has started, too."""

    worker_index: int
    signum: signal.Signals


@dataclass(frozen=True, kw_only=True)
class WorkerEnd:
    """How one worker ended.

    Attributes:
        worker_index: which.
        code: exit code, or minus the signal; None if that is not known (the zygote died first).
        at_s: when its end was seen, on the monotonic clock.
        record: what it left about its failure.
        stopped_by: the last signal that was sent to it before it ended, None if it ended by itself.
    """

    worker_index: int
    code: int | None = None
    at_s: float = 0.0
    record: FailureRecord | None = None
    stopped_by: signal.Signals | None = None

    @property
    def is_failure(self) -> bool:
        """Whether it failed by itself."""
        return self.record is not None or (self.code not in (0, None) and self.stopped_by is None)

    @property
    def exit_code(self) -> int:
        """What a shell would show for it: the exit code, or 128 plus the signal."""
        if self.record is not None:
            return self.record.exit_code
        code = 1 if self.code is None else self.code
        return code if code >= 0 else 128 - code


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """How the job ended.

    Attributes:
        exit_code: of the whole job.
        stopped_by: the signal with which a person or a system ended it.
        root: the worker whose failure came first.
        others: all other workers, in order.
        lost: what else died under the job, in words; empty if nothing did.
    """

    exit_code: int
    stopped_by: signal.Signals | None = None
    root: WorkerEnd | None = None
    others: tuple[WorkerEnd, ...] = ()
    lost: str = ""


class Supervisor:
    """Follows the workers of one job. Times are seconds on one monotonic clock."""

    def __init__(self, num_workers: int, *, is_managed: bool = False, stays: bool = False) -> None:
        self._ends: dict[int, WorkerEnd] = {}
        self._waiting = set(range(num_workers))
        self._founders = set(range(num_workers))
        self._is_managed = is_managed
        self._stays = stays
        self._job_code: int | None = None  # once the job is over, though this machine's workers may not tell
        self._survived: list[int] = []  # workers whose ends did not end the job, in that order
        self._alive: set[int] = set()
        self._records: dict[int, FailureRecord] = {}
        self._signalled: dict[int, signal.Signals] = {}
        self._ending: tuple[Escalation, ...] | None = None
        self._ending_since_s = 0.0
        self._stopped_by: signal.Signals | None = None
        self._lost = ""

    @property
    def is_done(self) -> bool:
        """No worker is alive and none is to start, now or later."""
        waits = self._stays and self._ending != ()  # once all was tried to end it, nothing is waited for
        return not self._alive and not self._waiting and not waits

    @property
    def is_ending(self) -> bool:
        """The job ends early."""
        return self._ending is not None

    def worker_started(self, worker_index: int) -> None:
        """A worker's process exists. One that comes when the job ends already is left to the zygote's end."""
        if worker_index in self._waiting:
            self._waiting.discard(worker_index)
            self._alive.add(worker_index)

    def worker_added(self, worker_index: int, *, founds: bool = False) -> bool:
        """One more is to start, a newcomer unless it ``founds``; False if the job ends and it should not."""
        if self.is_ending or self.is_done or self._job_code is not None:
            return False
        self._waiting.add(worker_index)
        if founds:
            self._founders.add(worker_index)
        return True

    def worker_failed(self, record: FailureRecord, now_s: float) -> bool:
        """A worker left a failure record; its process may need a while to end. Returns whether this is news."""
        if record.worker_index in self._records:
            return False
        self._records[record.worker_index] = record
        if not self._is_managed or record.worker_index in self._founders:
            self._end(_AFTER_FAILURE, now_s)
        return True

    def worker_exited(self, worker_index: int, code: int, at_s: float, now_s: float) -> bool:
        """A worker's process is gone. Returns whether the job goes on though it did not end well."""
        if worker_index not in self._alive:
            return False
        self._settle(worker_index, code, at_s)
        if code == 0 or self.is_ending:
            return False
        if self._is_managed and (code < 0 or worker_index not in self._founders):
            self._survived.append(worker_index)
            return not self.is_done
        self._end(_AFTER_FAILURE, now_s)
        return False

    def job_failed(self, reason: str, now_s: float, code: int = 1) -> None:
        """The manager says that the job cannot go on; on one of several machines its exit code is the job's."""
        if not self.is_ending:
            self._lost = self._lost or f"the job cannot go on: {reason}."
        self._end_stay(code)
        self._end(_AFTER_FAILURE, now_s)

    def job_ended(self) -> None:
        """The manager says that the job is done; scripts may have something left to do."""
        self._end_stay(0)

    def leave(self, signum: signal.Signals, grace_s: float, now_s: float) -> bool:
        """A signal that asks this machine to leave the job: its workers have ``grace_s``.

        Returns whether that was news; if not, treat it as ``stop_requested``.
        """
        if self._ending is not None:
            return False
        self._stopped_by, self._stays = signum, False
        self._end((Escalation(after_s=grace_s, signum=signal.SIGKILL),), now_s)
        return True

    def manager_lost(self, reason: str, now_s: float) -> None:
        """There will be no manager any more: a worker's death now ends the job, one a short while ago too."""
        self._is_managed = False
        if any(now_s - self._ends[index].at_s < _HEALED_S for index in self._survived):
            self._lost = self._lost or reason
            self._end(_AFTER_FAILURE, now_s)

    def store_lost(self, now_s: float) -> None:
        """The rendezvous store died: workers can not find each other again, unless a manager helps them."""
        if self._is_managed:
            return  # later generations have stores of their own; in a start that fails, workers say why
        self._lost = self._lost or "the process that hosts the rendezvous store died (out of memory?)."
        self._end(_AFTER_FAILURE, now_s)

    def zygote_lost(self, code: int, now_s: float) -> None:
        """The zygote ended, with this exit code or minus this signal; its workers end with it, unreported."""
        how = f"with code {code}, see above" if code >= 0 else f"by signal {-code} (out of memory?)"
        self._lost = f"the process that starts workers ended {how}, and all workers with it."
        self._stays = False
        for worker_index in tuple(self._alive | self._waiting):
            self._settle(worker_index, None, now_s)

    def stop_requested(self, signum: signal.Signals, now_s: float) -> None:
        """A signal to the launcher; a second one ends everything at once."""
        self._stays = False
        if self._ending is not None:
            self._ending, self._ending_since_s = _AT_ONCE, now_s
            return
        self._stopped_by = signum
        self._end(_AFTER_INTERRUPT if signum == signal.SIGINT else _AFTER_TERMINATE, now_s)

    def due_signals(self, now_s: float) -> list[WorkerSignal]:
        """What to send now; each step is given once."""
        due: list[WorkerSignal] = []
        while self._ending and now_s >= self._ending_since_s + self._ending[0].after_s:
            signum = self._ending[0].signum
            self._ending = self._ending[1:]
            for worker_index in sorted(self._alive):
                self._signalled[worker_index] = signum
                due.append(WorkerSignal(worker_index=worker_index, signum=signum))
        return due

    def wait_s(self, now_s: float) -> float | None:
        """Seconds until ``due_signals`` has something again; None if only an event can bring that."""
        if not self._ending:
            return None
        return max(0.0, self._ending_since_s + self._ending[0].after_s - now_s)

    def outcome(self) -> Outcome:
        """How the job ended; call it when ``is_done``."""
        ends = tuple(self._ends[index] for index in sorted(self._ends))
        if self._stopped_by is not None:
            return Outcome(exit_code=128 + self._stopped_by, stopped_by=self._stopped_by, others=ends)
        if self._job_code == 0 and not self.is_ending:
            return Outcome(exit_code=0, others=self._without(None))
        root = self._root(ends)
        if root is None:
            code = self._job_code or int(bool(self._lost))
            return Outcome(exit_code=code, others=self._without(None), lost=self._lost)
        lost = "" if root.record is not None and self._survived else self._lost  # it says the same
        code = self._job_code or root.exit_code
        return Outcome(exit_code=code, root=root, others=self._without(root), lost=lost)

    def _root(self, ends: tuple[WorkerEnd, ...]) -> WorkerEnd | None:
        """The end that ended the job; None if it ended well, or by something other than a worker."""
        if not self.is_ending and self._survived:
            last = max(ends, key=lambda end: end.at_s)
            return last if last.is_failure else None
        failures = [end for end in ends if end.is_failure and end.worker_index not in self._survived]
        causes = [end for end in failures if end.record is None or end.record.is_root_cause]
        if not causes and self._survived:
            return self._ends[self._survived[-1]]
        return min(failures, key=_cause_order, default=None)

    def _without(self, root: WorkerEnd | None) -> tuple[WorkerEnd, ...]:
        """All other ends, but for those long ago that the job survived."""
        ends = sorted(self._ends.items())
        return tuple(end for index, end in ends if end is not root and index not in self._survived)

    def _end_stay(self, code: int) -> None:
        if self._stays:
            self._stays, self._job_code = False, code

    def _settle(self, worker_index: int, code: int | None, at_s: float) -> None:
        self._alive.discard(worker_index)
        self._waiting.discard(worker_index)
        self._ends[worker_index] = WorkerEnd(
            worker_index=worker_index,
            code=code,
            at_s=at_s,
            record=self._records.get(worker_index),
            stopped_by=self._signalled.get(worker_index),
        )

    def _end(self, steps: tuple[Escalation, ...], now_s: float) -> None:
        if self._ending is not None:
            return
        self._ending, self._ending_since_s = steps, now_s
        for worker_index in tuple(self._waiting):
            self._settle(worker_index, None, now_s)


def _cause_order(end: WorkerEnd) -> tuple[bool, float]:
    """Root causes before their consequences, then by time. A death without a record is a cause."""
    if end.record is not None:
        return not end.record.is_root_cause, end.record.at_s
    return False, end.at_s
