"""What the manager knows: plain values that can be written down and read again. No decisions here."""

from __future__ import annotations

import enum

from msgspec import Struct, field

from varuna.generations import FormingTimes, HaltReport
from varuna.morph.messages import CheckpointComplete, Described, Form, StartFounders, StartWorker
from varuna.morph.phases import Phase
from varuna.spec import Plan


class WorkerStatus(enum.Enum):
    """How far a worker has come."""

    STARTED = "started"
    """Its process runs; it captures the model, or founds the job."""
    READY = "ready"
    """A newcomer that can be given a place."""
    MEMBER = "member"
    """In the newest generation."""
    LEAVING = "leaving"
    """Told to leave."""
    GONE = "gone"
    """Its process has ended, or it was fenced: nothing it says counts."""


class Leaving(Struct, frozen=True, kw_only=True):
    """Somebody asked for a worker to go; ``deadline_s`` on the manager's clock, None if it is not known."""

    source: str
    deadline_s: float | None


class WorkerRecord(Struct, kw_only=True):
    """One incarnation.

    Attributes:
        incarnation: its name.
        status: how far it has come.
        agent, machine, pid: who started it, and where; empty until its agent has told.
        founding_rank: its rank in generation 0, None for newcomers.
        digest: of a newcomer's sections.
        store_address: of the store that a newcomer offered when it was ready.
        ready_s: when it was ready, on the manager's clock.
        has_state: it knows schedulers, loss scale and step count: it was in a generation that opened.
        leaving: who asked it to go; ``asked`` are all who did, by source and the source's name for it.
        speed: as a share of its peers', as far as is known.
        rests_until_s: it is too slow to get work before then; ``num_rests`` counts such times.
        ended_well: its script ended.
        gone_reason: why it is gone; ``is_fenced`` if that was the manager's decision and its end is not known.
    """

    incarnation: str
    status: WorkerStatus = WorkerStatus.STARTED
    agent: str = ""
    machine: str = ""
    pid: int = 0
    founding_rank: int | None = None
    digest: str = ""
    store_address: str = ""
    ready_s: float = 0.0
    has_state: bool = False
    leaving: Leaving | None = None
    asked: dict[str, Leaving] = field(default_factory=dict)
    speed: float = 1.0
    rests_until_s: float | None = None
    num_rests: int = 0
    ended_well: bool = False
    gone_reason: str = ""
    is_fenced: bool = False


class OfferRecord(Struct, kw_only=True):
    """What an agent can run.

    Attributes:
        num_workers: how many workers.
        number: of the offer.
        order: what the agent was told; None while the job gathers workers.
    """

    num_workers: int
    number: int
    order: StartFounders | StartWorker | None = None


class GenerationRecord(Struct, kw_only=True):
    """The newest generation.

    Attributes:
        number: of the generation.
        members: by rank, those that are gone since included.
        plan: its layout; None while the first one is founded.
        step_s: predicted seconds of a step, None without a prediction.
        micro_batch_s: predicted seconds for a micro-batch, per pipeline and stage; empty without a prediction.
        next_step: the step it began with.
        givers: members without a stage that only give their sections away and then leave.
        formed: members in which it is open, and what that took.
        reports: of members that have halted.
        in_script: members that were told to give up while their scripts were in code of their own.
        back_s: when such members came back from there, on the manager's clock.
        finished: members whose scripts are over.
        committed_step, committed: the newest step whose commit is known to have returned on any member, and
            what it returned, as far as members have told.
        busy_s: per member, seconds in which it computed in each of its last steps.
        forms: what each member was told, to tell it again.
    """

    number: int
    members: tuple[str, ...] = ()
    plan: Plan | None = None
    step_s: float | None = None
    micro_batch_s: tuple[tuple[float, ...], ...] = ()
    next_step: int = 0
    givers: tuple[str, ...] = ()
    formed: dict[str, FormingTimes] = field(default_factory=dict)
    reports: dict[str, HaltReport] = field(default_factory=dict)
    in_script: set[str] = field(default_factory=set)
    back_s: dict[str, float] = field(default_factory=dict)
    finished: set[str] = field(default_factory=set)
    committed_step: int = -1
    committed: str = ""
    busy_s: dict[str, list[float]] = field(default_factory=dict)
    forms: dict[str, Form] = field(default_factory=dict)


class JobRecord(Struct, kw_only=True):
    """All the manager knows of a job. Times are seconds of the manager's clock.

    Attributes:
        phase, since_s, reason: where the job stands, since when, and why.
        description: what rank 0 said.
        workers: all incarnations ever heard of, in that order.
        agents: all agents ever heard of.
        offers: of agents, by name, in the order in which they came; ``offered_s`` is when the last one came.
        attempt: of founding the job with workers that agents offered.
        exit_code: of the job, once it has ended.
        is_saved: the script of a worker that was worker 0 to the end is over.
        generation: the newest.
        checkpoint: the newest complete one.
        num_committed: steps that have happened.
        loss_s: when a founder was lost before the first generation was known.
        stopped_s: since when training stands still; None while it goes on.
        wait_until_s: a ready newcomer waits for more of them until then.
        morph_costs_s: seconds that recent morphs kept training waiting, oldest first.
        arrivals_s: when recent newcomers became ready.
        durations_s: of recent steps.
        newcomer_failures: how often newcomers ended with the same failure.
        num_lost_newcomers: that were lost before they had joined, since one has.
    """

    phase: Phase = Phase.FOUNDING
    since_s: float = 0.0
    reason: str = ""
    description: Described | None = None
    workers: dict[str, WorkerRecord] = field(default_factory=dict)
    agents: list[str] = field(default_factory=list)
    offers: dict[str, OfferRecord] = field(default_factory=dict)
    offered_s: float = 0.0
    attempt: int = 0
    exit_code: int = 0
    is_saved: bool = False
    generation: GenerationRecord = field(default_factory=lambda: GenerationRecord(number=0))
    checkpoint: CheckpointComplete | None = None
    num_committed: int = 0
    loss_s: float | None = None
    stopped_s: float | None = None
    wait_until_s: float | None = None
    morph_costs_s: list[float] = field(default_factory=list)
    arrivals_s: list[float] = field(default_factory=list)
    durations_s: list[float] = field(default_factory=list)
    newcomer_failures: dict[str, int] = field(default_factory=dict)
    num_lost_newcomers: int = 0

    def with_status(self, *statuses: WorkerStatus) -> list[WorkerRecord]:
        """Workers of these statuses, in the order in which they were first heard of."""
        return [worker for worker in self.workers.values() if worker.status in statuses]

    def members(self) -> list[WorkerRecord]:
        """Living members of the newest generation, by rank."""
        records = (self.workers[name] for name in self.generation.members)
        return [record for record in records if record.status is WorkerStatus.MEMBER]

    def ready(self) -> list[WorkerRecord]:
        """Newcomers that can be given a place, in the order in which they became ready."""
        ready = self.with_status(WorkerStatus.READY)
        return sorted(ready, key=lambda worker: (worker.ready_s, worker.incarnation))
