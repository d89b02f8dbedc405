"""Whether a job has fewer workers than it wants, and when to ask for machines. Pure: the time is passed in.

Every call says how many workers there are and how many are wanted, never how many more: a call that was lost,
or came twice, does no harm.
"""

from __future__ import annotations

from dataclasses import dataclass

from msgspec import Struct

from varuna.morph.gathering import is_gathering
from varuna.morph.phases import ENDED, Phase
from varuna.morph.policy import Policy
from varuna.morph.record import JobRecord, WorkerRecord, WorkerStatus

BY_A_PERSON = "user"
"""The source of a wish to leave that is no loss: whoever asked wants fewer workers."""

_MOST_WAITS = 16
"""After failures, calls are so many times further apart at most."""

_PRESENT = (WorkerStatus.STARTED, WorkerStatus.READY, WorkerStatus.MEMBER)


class Call(Struct, frozen=True, kw_only=True):
    """What whoever can start machines is told, as JSON.

    Attributes:
        run_id: name of the run; empty if the manager was not told.
        workers_present: that work, or are about to; those that were told to leave are none of them.
        workers_wanted: that the job wants.
        why: for people.
        phase: where the job stands: ``waiting`` if it cannot go on without more.
    """

    run_id: str
    workers_present: int
    workers_wanted: int
    why: str
    phase: str


@dataclass(frozen=True, kw_only=True)
class ScalePolicy:
    """When to ask.

    Attributes:
        workers: that the job wants; None: as many as it has had, less those that a person sent away.
        settle_s: what is mended by then is not worth a call.
        every_s: from one call to the next.
    """

    workers: int | None = None
    settle_s: float = 5.0
    every_s: float = 60.0


class Scaling:
    """Looks at a job again and again, and says when to ask.

    Args:
        run_id: of the job.
        policy: of the manager; ``scale`` is this decision's own.
    """

    def __init__(self, run_id: str, policy: Policy, scale: ScalePolicy) -> None:
        self._run_id = run_id
        self._policy = policy
        self._scale = scale
        self._most: int | None = None
        self._sent_away: set[str] = set()
        self._short_since_s: float | None = None
        self._next_s = 0.0
        self._num_failed = 0

    def look(self, job: JobRecord, now_s: float) -> Call | None:
        """The call that is due; it counts as made."""
        short = self._shortage(job)
        if short is None:
            self._short_since_s = None
            return None
        if self._short_since_s is None:
            self._short_since_s = now_s
        if now_s < max(self._short_since_s + self._scale.settle_s, self._next_s):
            return None
        self._next_s = now_s + self._scale.every_s
        return short

    def answered(self, *, well: bool, now_s: float) -> None:
        """How the last call went: after one that failed, the next is twice as far away as the last was."""
        self._num_failed = 0 if well else self._num_failed + 1
        waits = min(_MOST_WAITS, 2**self._num_failed)
        self._next_s = max(self._next_s, now_s + waits * self._scale.every_s if not well else self._next_s)

    def _shortage(self, job: JobRecord) -> Call | None:
        if job.phase in ENDED or job.phase is Phase.FINISHING or job.generation.finished:
            return None
        gathers = job.phase is Phase.FOUNDING and self._policy.min_workers > 0 and is_gathering(job)
        if job.phase is Phase.FOUNDING and not gathers:
            return None  # whoever founds it is on the way
        workers = list(job.workers.values())
        present = [one for one in workers if one.status in _PRESENT and one.leaving is None]
        num_present = sum(offer.num_workers for offer in job.offers.values()) if gathers else len(present)
        wanted = self._wanted(workers, num_present)
        if num_present >= wanted:
            return None
        return Call(
            run_id=self._run_id,
            workers_present=num_present,
            workers_wanted=wanted,
            why=f"{num_present} of {wanted} workers are there: {_why(job)}",
            phase=job.phase.value,
        )

    def _wanted(self, workers: list[WorkerRecord], num_present: int) -> int:
        sent_away = {one.incarnation for one in workers if one.leaving and one.leaving.source == BY_A_PERSON}
        if self._most is None:
            num_founders = sum(one.founding_rank is not None for one in workers)
            self._most = max(self._policy.min_workers, num_founders)
        self._most = max(num_present, self._most - len(sent_away - self._sent_away))
        self._sent_away = sent_away
        return self._most if self._scale.workers is None else self._scale.workers


def _why(job: JobRecord) -> str:
    """What is known of it in a line: why the job waits, else who left last."""
    if job.phase in (Phase.WAITING, Phase.FOUNDING) and job.reason:
        return job.reason
    left = [one for one in job.workers.values() if one.leaving is not None or one.gone_reason]
    if not left:
        return "no more have come"
    last = left[-1]
    if last.leaving is not None:
        return f"{last.incarnation} leaves ({last.leaving.source})"
    return f"{last.incarnation} is gone: {last.gone_reason}"
