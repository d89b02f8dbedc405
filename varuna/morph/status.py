"""What ``varuna status`` shows, from what the manager knows."""

from __future__ import annotations

from varuna.morph.hub import Hub
from varuna.morph.record import WorkerRecord
from varuna.morph.views import Status, WorkerState
from varuna.spec import Plan

_NUM_EVENTS = 10


def status_of(hub: Hub) -> Status:
    """The job as it is now."""
    job = hub.manager.job
    ranks = {name: rank for rank, name in enumerate(job.generation.members)}
    connected = hub.connected
    workers = [
        _state_of(worker, ranks.get(worker.incarnation), job.generation.plan, connected)
        for worker in job.workers.values()
    ]
    return Status(
        phase=job.phase.value,
        reason=job.reason,
        generation=job.generation.number,
        plan=job.generation.plan,
        num_committed=job.num_committed,
        workers=tuple(sorted(workers, key=lambda worker: (worker.rank is None, worker.rank or 0))),
        events=tuple(hub.events.newest(_NUM_EVENTS, without="step")),
    )


def _state_of(
    worker: WorkerRecord, rank: int | None, plan: Plan | None, connected: frozenset[str]
) -> WorkerState:
    return WorkerState(
        incarnation=worker.incarnation,
        machine=worker.machine,
        status=worker.status.value,
        rank=rank,
        position="" if rank is None or plan is None else _position(plan, rank),
        leaving="" if worker.leaving is None else worker.leaving.source,
        gone_reason=worker.gone_reason,
        is_connected=worker.incarnation in connected,
        pid=worker.pid,
    )


def _position(plan: Plan, rank: int) -> str:
    position = plan.position_of(rank)
    if position is None:
        return "spare"
    return f"pipeline {position.pipeline_index}, stage {position.stage_index}"
