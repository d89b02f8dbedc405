"""What members, agents and the manager say to one another: JSON, one tagged value a message, checked when read.

A *worker* is a process. It is known by its ``incarnation``, a text that is never used twice; a worker that was
fenced and comes back gets a new one. Whoever sends is known from the connection, so what workers say does not
repeat it. Durations are seconds.
"""

from __future__ import annotations

from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from varuna.errors import ProtocolError
from varuna.generations import Formation, FormingTimes, HaltReport, SampleShare
from varuna.plan.profile import Profile
from varuna.spec import Plan, SectionSpec

_T = TypeVar("_T")

Count = Annotated[int, Meta(ge=0, le=2**40)]
NumWorkers = Annotated[int, Meta(ge=0, le=65536)]
Seconds = Annotated[float, Meta(ge=0, le=1e9)]
Name = Annotated[str, Meta(min_length=1, max_length=200)]
NameOrNone = Annotated[str, Meta(max_length=200)]
"""What numbers and names in messages can be; anything else is no message."""


# --- a worker says --------------------------------------------------------------------------


class Beat(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It is alive; told about once a second, whatever its training thread does."""


class Described(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What the job is; rank 0 of the first generation says it once, before ``Formed``; if that ends, all do.

    Attributes:
        sections: of the model.
        batch_size: samples of a global batch.
        num_stages, micro_batch_size, schedule, recompute: what the user fixed of the layout.
        profile: plans are chosen with it; None without one.
        dataset_length, seed: with ``batch_size`` they say which samples a step uses.
        first_step: with which it begins; not 0 if it goes on from a checkpoint.
        last_save: number of the newest save that was in the place of checkpoints when it began; 0 without.
        step_s: predicted seconds of a step of the first plan; None without a prediction.
        micro_batch_s: seconds of computing for a micro-batch, per pipeline and stage; empty without.
    """

    sections: tuple[SectionSpec, ...]
    batch_size: int
    num_stages: int | None = None
    micro_batch_size: int | None = None
    schedule: str | None = None
    recompute: bool | tuple[bool, ...] | None = None
    profile: Profile | None = None
    dataset_length: int
    seed: int
    first_step: Annotated[int, Meta(ge=0)] = 0
    last_save: Count = 0
    step_s: float | None = None
    micro_batch_s: tuple[tuple[float, ...], ...] = ()


class Ready(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A newcomer has captured the model and can be given a place.

    Attributes:
        digest: of its sections.
        store_address: of the store that it offers, as in ``HaltReport``.
    """

    digest: str
    store_address: str = ""


class Formed(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The generation is open here and works.

    Attributes:
        generation: which.
        plan: told by rank 0 of the first generation.
        times: what it took.
    """

    generation: Count
    plan: Plan | None = None
    times: FormingTimes = FormingTimes()


class StepDone(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A step's update has been made here.

    Attributes:
        generation, step_index: which.
        duration_s: of the step.
        busy_s: in which this worker ran tasks; 0 if that was not measured.
        num_samples: of the global batch.
        committed: what its commit returned; if all who saw it are lost, the manager can still tell the others.
        samples: of the global batch, that this worker has read.
    """

    generation: Count
    step_index: Count
    duration_s: Seconds
    busy_s: Seconds = 0.0
    num_samples: Count
    committed: str = ""
    samples: SampleShare | None = None


class Halted(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The generation has ended here; it waits for what follows."""

    report: HaltReport


class Finished(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Its script is over. It stays until those of all members are: what it holds may be needed until then."""

    report: HaltReport


class InScript(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It was told to give up while its script was in code of its own, and does so when that has returned.

    Attributes:
        generation: which was to end.
        is_there: False: the training thread has come back, and reports or goes there again.
    """

    generation: Count
    is_there: bool


class CheckpointComplete(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A checkpoint is complete and durable: the job can go back to it.

    Attributes:
        next_step: the step with which a job that goes back to it begins.
        sequence: number of the save; newer ones have higher ones, whatever their steps.
        address: where it is.
        is_found: who says so has looked in the place of checkpoints, and does not know which job wrote it.
    """

    next_step: Annotated[int, Meta(ge=0)]
    sequence: Count
    address: Annotated[str, Meta(min_length=1, max_length=4096)]
    is_found: bool = False


# --- an agent says --------------------------------------------------------------------------


class Offer(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """It can run workers, and waits to be told which.

    Attributes:
        num_workers: how many; 0 of one that only wants to hear how the job ends.
        number: counts the offers of one agent from 1; the same one again is no news.
    """

    num_workers: NumWorkers
    number: Annotated[int, Meta(ge=1)] = 1


class WorkerStarted(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A process was started.

    Attributes:
        incarnation, machine: its name, and where it is.
        rank: of those that found the job; None for newcomers.
        attempt: of founding the job, as in ``StartFounders``.
        pid: of the process there; 0 if not known.
    """

    incarnation: Name
    machine: Name
    rank: NumWorkers | None = None
    attempt: Count = 0
    pid: Count = 0


class WorkerExited(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A process is gone.

    Attributes:
        incarnation: which.
        code: exit code, or minus the number of the signal that ended it.
        failure: one line about the Python exception that ended it; empty if none did.
    """

    incarnation: Name
    code: int
    failure: str = ""


class LeaveAsked(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A worker or all workers of a machine will have to go.

    Attributes:
        incarnation, machine: one of them, the other empty.
        deadline_s: seconds until it is gone; 0 if that is not known.
        source: who says so: ``aws``, ``user``, ``SIGTERM`` and so on.
        event_id: the source's name for it. Told again under the same name, it replaces what was told.
    """

    incarnation: NameOrNone = ""
    machine: NameOrNone = ""
    deadline_s: Seconds = 0.0
    source: Name
    event_id: NameOrNone = ""


class LeaveWithdrawn(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """What a ``LeaveAsked`` for a machine announced will not happen; whoever has not left yet may stay."""

    machine: Name
    source: Name
    event_id: NameOrNone = ""


# --- the manager's own watch says --------------------------------------------------------


class WorkerLost(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """Nothing is heard of a worker any more: it is fenced, whether or not its process still runs."""

    incarnation: str
    reason: str


class AgentLost(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """An agent's connection has ended, and it has not come back."""

    agent: str


# --- the manager says -----------------------------------------------------------------------


class Pause(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """End the generation after the step under way."""

    generation: int


class Abort(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """A member of the generation is gone: give up what is under way and report."""

    generation: int
    reason: str


class Form(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """How a halted or ready worker goes on.

    Attributes:
        formation: the next generation.
        committed: as in ``Verdict``.
        checkpoint: where sections and the job's state come from, if nobody has them any more: whatever the
            worker holds is void from now on, and it stands before step ``formation.next_step``.
    """

    formation: Formation
    committed: str = ""
    checkpoint: str = ""


class Leave(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """The worker is not needed any more: end in good order."""

    reason: str


class Alive(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """To an agent: the manager is at work. Told about once a second."""


class StopWorker(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """To an agent: kill a process that was fenced."""

    incarnation: str


class Welcome(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """To an agent, whenever it connects: what its workers have to know.

    Attributes:
        run_id: name of the run.
        store_port: where the store listens, on the manager's machine.
    """

    run_id: str
    store_port: int


class StartFounders(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """To an agent: start ``count`` of the ``size`` workers that found the job, from rank ``first_rank`` on.

    ``attempt`` counts from 0: founding begins anew if a machine is lost before the first generation is open.
    """

    count: int
    first_rank: int
    size: int
    attempt: int = 0


class StartWorker(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """To an agent: start newcomers. ``offer``: of which of its offers; heard again, it is not obeyed again."""

    count: int = 1
    offer: int = 0


class JobEnded(Struct, frozen=True, kw_only=True, tag=True, forbid_unknown_fields=True):
    """To agents: the job cannot go on, or is done (``failure`` empty). ``code`` is its exit code."""

    failure: str = ""
    code: int = 0


FromWorker = Beat | Described | Ready | Formed | StepDone | InScript | Halted | Finished | CheckpointComplete
FromAgent = Offer | WorkerStarted | WorkerExited | LeaveAsked | LeaveWithdrawn
FromWatch = WorkerLost | AgentLost
ToWorker = Pause | Abort | Form | Leave
ToAgent = Welcome | Alive | StopWorker | StartFounders | StartWorker | JobEnded

_from_worker = msgspec.json.Decoder(FromWorker)
_from_agent = msgspec.json.Decoder(FromAgent)
_to_worker = msgspec.json.Decoder(ToWorker)
_to_agent = msgspec.json.Decoder(ToAgent)


def encode(message: FromWorker | FromAgent | FromWatch | ToWorker | ToAgent) -> bytes:
    """A message as JSON."""
    return msgspec.json.encode(message)


def decode_from_worker(data: bytes | str) -> FromWorker:
    """A worker's message. Raises ``ProtocolError`` for anything else."""
    return _decode(_from_worker, data)


def decode_from_agent(data: bytes | str) -> FromAgent:
    """An agent's message. Raises ``ProtocolError`` for anything else."""
    return _decode(_from_agent, data)


def decode_to_worker(data: bytes | str) -> ToWorker:
    """The manager's message to a worker. Raises ``ProtocolError`` for anything else."""
    return _decode(_to_worker, data)


def decode_to_agent(data: bytes | str) -> ToAgent:
    """The manager's message to an agent. Raises ``ProtocolError`` for anything else."""
    return _decode(_to_agent, data)


def _decode(decoder: msgspec.json.Decoder[_T], data: bytes | str) -> _T:
    try:
        return decoder.decode(data)
    except (msgspec.DecodeError, UnicodeError) as error:
        shown = data[:80]
        raise ProtocolError(f"A message that is none of ours: {error}; it begins with {shown!r}.") from error
