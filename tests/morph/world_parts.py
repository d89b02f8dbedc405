"""What a world for the manager is made of: sections, plans, workers, what collectives remember."""

from __future__ import annotations

import functools
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from varuna.errors import PlanError
from varuna.generations import Formation, SampleShare, SectionTransfer
from varuna.morph.messages import (
    Described,
    Form,
    FromAgent,
    FromWatch,
    FromWorker,
    Leave,
    ToWorker,
)
from varuna.morph.planning import Planned
from varuna.order import digest_of, sample_ids
from varuna.plan.layout import simple_plan
from varuna.spec import Plan, SectionSpec

NUM_SECTIONS = 4
BATCH_SIZE = 8
Action = Callable[[], None]
Message = FromWorker | FromAgent | FromWatch

SECTIONS = tuple(
    SectionSpec(
        index=index,
        name=str(index),
        parameter_names=(f"p{index}",),
        parameter_bytes=10 + index,
        forward_flops=1.0,
        output_bytes=1,
    )
    for index in range(NUM_SECTIONS)
)
DESCRIBED = Described(sections=SECTIONS, batch_size=BATCH_SIZE, dataset_length=100, seed=3)


@functools.cache
def plan_of(num_workers: int, num_stages: int) -> Plan:
    return simple_plan(
        sections=SECTIONS,
        num_workers=num_workers,
        batch_size=BATCH_SIZE,
        num_stages=num_stages,
        micro_batch_size=1,
    ).plan


def planner(least: int, stages: tuple[int, ...]) -> Callable[[int, Described], Planned]:
    """Plans for ``least`` workers or more; the number of stages changes with the number of workers."""

    def plan_for(num_workers: int, _: Described) -> Planned:
        if num_workers < least:
            raise PlanError(f"{num_workers} workers are too few: it takes {least}.")
        wanted = stages[num_workers % len(stages)]
        return Planned(plan=plan_of(num_workers, min(wanted, num_workers)))

    return plan_for


@dataclass
class Worker:
    """A process. ``versions`` has, per section that it holds, the number of updates that were made to it."""

    name: str
    agent: str
    is_newcomer: bool
    mode: str = "starting"  # starting, ready, meeting, moving, opening, running, halted, finished, ended
    generation: int = -1
    formation: Formation | None = None
    plan: Plan | None = None
    num_moved: int = 0
    num_applied: int = 0
    num_seen: int = 0  # steps that its script has seen, and whether it was worker 0 at the last of them
    was_first: bool = False
    reduced: bool = False
    returned: bool = False  # the commit of the step under way has returned here
    committed_step: int | None = None
    committed: str = ""
    has_state: bool = False
    slowness: float = 1.0
    frozen: bool = False
    is_alive: bool = True
    ended_well: bool = False
    asked_pause: set[int] = field(default_factory=set)
    aborted: set[int] = field(default_factory=set)
    versions: dict[int, int] = field(default_factory=dict)
    newest_form: int = -1
    checkpoint: str = ""
    state: FromWorker | None = None  # what it says again when it connects again
    outbox: deque[FromWorker] = field(default_factory=deque)
    inbox: deque[ToWorker] = field(default_factory=deque)
    orders: deque[Form | Leave] = field(default_factory=deque)  # read by the training thread when it waits


@dataclass
class Record:
    """What a generation's collectives remember: who came, who contributed with which wish to pause."""

    members: tuple[str, ...]
    met: set[str] = field(default_factory=set)
    moved: set[str] = field(default_factory=set)
    begun: dict[int, set[str]] = field(default_factory=dict)
    contributed: dict[int, dict[str, bool]] = field(default_factory=dict)


def is_lost(other: Worker, worker: Worker) -> bool:
    """Whether ``worker`` may notice that it waits in vain for ``other``."""
    if not other.is_alive:
        return not other.ended_well or other.num_applied <= worker.num_applied - 1
    if worker.mode == "meeting" and other.generation < worker.generation:
        return False  # it has not come yet
    return other.generation != worker.generation or other.mode == "halted"


def busy_s(worker: Worker) -> float:
    """Half a second for each micro-batch of its pipeline, if it is not slow."""
    assert worker.plan is not None
    position = worker.plan.position_of(rank_of(worker))
    if position is None:
        return 0.0
    return 0.5 * worker.slowness * worker.plan.pipelines[position.pipeline_index].num_micro_batches


def rank_of(worker: Worker) -> int:
    """Its rank in its generation."""
    return int(worker.name[1:]) if worker.formation is None else worker.formation.rank


def samples_of(worker: Worker, step: int) -> SampleShare | None:
    """What it has read for a step, if it is the first stage of a pipeline."""
    assert worker.plan is not None
    position = worker.plan.position_of(rank_of(worker))
    if position is None or position.stage_index > 0:
        return None
    pipeline = worker.plan.pipelines[position.pipeline_index]
    first, end = pipeline.first_micro_batch, pipeline.end_micro_batch  # of one sample each
    ids = sample_ids(step, DESCRIBED.dataset_length, BATCH_SIZE, DESCRIBED.seed)
    return SampleShare(first=first, end=end, digest=digest_of(ids[first:end]))


def wanted_sections(worker: Worker) -> set[int]:
    """What its stage in the generation that is formed consists of."""
    assert worker.formation is not None
    stage = worker.formation.plan.stage_of(worker.formation.rank)
    return set() if stage is None else set(range(stage.first_section, stage.end_section))


def own_transfers(worker: Worker) -> tuple[SectionTransfer, ...]:
    """Those that it takes part in."""
    formation = worker.formation
    assert formation is not None
    return tuple(one for one in formation.transfers if formation.rank in (one.source, one.destination))
