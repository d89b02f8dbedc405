"""What people and commands ask of a manager, and what they are shown. Values."""

from __future__ import annotations

from msgspec import Struct

from varuna.spec import Plan
from varuna.versions import Versions

# --- shown ----------------------------------------------------------------------------------


class LoggedEvent(Struct, frozen=True, kw_only=True, omit_defaults=True):
    """One event.

    Attributes:
        number: counts from 1 for each life of the manager.
        at: when, UTC, ISO 8601.
        kind: a word to filter by.
        text: for people.
        generation: in which it happened.
        step_index: of the step that it is about.
        figures: its numbers by name: for ``running``, how many ``workers`` of ``members`` have work, and what
            the morph before it took (``times.py``).
    """

    number: int
    at: str
    kind: str
    text: str
    generation: int
    step_index: int | None = None
    figures: dict[str, float] = {}


class WorkerState(Struct, frozen=True, kw_only=True):
    """One incarnation.

    Attributes:
        incarnation, machine: which, and where.
        status: how far it has come, as in ``WorkerStatus``.
        rank: in the newest generation; None if it is in none.
        position: what it does there: ``pipeline 0, stage 1``, ``spare``, or empty.
        leaving: who asked it to go; empty if nobody did.
        gone_reason: why it is gone.
        is_connected: its line to the manager is up.
        pid: of its process on its machine; 0 if not known.
    """

    incarnation: str
    machine: str
    status: str
    rank: int | None
    position: str
    leaving: str
    gone_reason: str
    is_connected: bool
    pid: int = 0


class Status(Struct, frozen=True, kw_only=True):
    """A job.

    Attributes:
        phase, reason: where it stands, and why.
        generation: number of the newest.
        plan: its layout, None before the first.
        num_committed: steps that have happened.
        workers: all incarnations ever heard of, members first, by rank.
        events: the last ones, without single steps.
    """

    phase: str
    reason: str
    generation: int
    plan: Plan | None
    num_committed: int
    workers: tuple[WorkerState, ...]
    events: tuple[LoggedEvent, ...]


class About(Struct, frozen=True, kw_only=True):
    """What a manager says of itself.

    Attributes:
        run_id: of its job; empty if that is known on its own machine alone.
        versions: of its machine, which all others need.
        unix_s: its clock, seconds since 1970.
    """

    run_id: str
    versions: Versions
    unix_s: float


# --- asked ----------------------------------------------------------------------------------


class PreemptRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A worker or all workers of a machine are to leave.

    Attributes:
        worker, machine: incarnation, or name of a machine; the other empty.
        deadline_s: seconds until it is gone; 0: take the time that it needs.
        source: who says so.
    """

    worker: str = ""
    machine: str = ""
    deadline_s: float = 0.0
    source: str = "user"


class AddRequest(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """``count`` more workers, on this machine or on any."""

    count: int
    machine: str = ""
