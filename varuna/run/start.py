"""From what the user gave to the first generation at work: capture, plan, verify, place, open.

Every worker runs this; where one must decide for all (shapes, plan) it is worker 0, and the others take it from
the store.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.config import LayoutConfig, ProfileConfig, WorldConfig
from varuna.errors import CheckFailed
from varuna.events import CaptureFinished, CheckFinished, Event, Notice, PlanChosen
from varuna.partition import InputSignature, Partition, Section, flatten_batch, signature_of
from varuna.partition.check import check_split, why_not_checked
from varuna.partition.materialise import materialise, return_memory
from varuna.plan import PlanChoice
from varuna.plan.layout import check_micro_batch_size
from varuna.plan.profile import Profile
from varuna.run.data import probe_first_batch
from varuna.run.generation import Generation
from varuna.run.groups import World
from varuna.run.holders import held_buffers, held_names
from varuna.run.initial import InitialValues, give_values, unread_buffers
from varuna.run.job import JobSpec
from varuna.run.memory import available_bytes, reset_peak_memory
from varuna.run.parameters import ParameterHolding
from varuna.run.partitions import EXAMPLE_NUM_SAMPLES, PartitionOptions, Partitions
from varuna.run.planning import Planned, plan_job
from varuna.run.precision import Precision, convert_model
from varuna.run.refine import StageRefiner
from varuna.run.reform import Worker
from varuna.run.startup import (
    agree_on_signature,
    compare_partitions,
    compare_settings,
    compare_versions,
    compare_weights,
    is_on_meta,
    leader_first,
)
from varuna.spec import Plan

Publish = Callable[[Event], None]


@dataclass(frozen=True, kw_only=True)
class StartRequest:
    """What a job is started from.

    Attributes:
        model, optimizer: the user's.
        lr_scheduler, clip_grad_norm: what happens at an update.
        config: this worker among all.
        device: where it computes.
        layout: what the user fixed of the plan.
        precision: number format.
        check: whether to compare a split step with an unsplit one.
        init_weights: the user's function for models on the meta device.
        initial: values that come from elsewhere.
        job: data and arithmetic.
        options: how the model is captured and cut.
        profile: whether and what to measure before planning.
        traced_steps: which steps are recorded for a trace file.
        begin: called when sections are where the plan wants them: may give them other values, from a
            checkpoint; returns the first step.
    """

    model: nn.Module
    optimizer: Optimizer
    lr_scheduler: LRScheduler | None = None
    clip_grad_norm: float | None = None
    config: WorldConfig
    device: torch.device
    layout: LayoutConfig
    precision: Precision
    check: bool
    init_weights: Callable[[nn.Module], None] | None
    job: JobSpec
    options: PartitionOptions
    initial: InitialValues | None = None
    profile: ProfileConfig = field(default_factory=ProfileConfig)
    traced_steps: range = range(0)
    begin: Callable[[Worker], int] = lambda _: 0


@dataclass(frozen=True, kw_only=True)
class StartedJob:
    """The first generation, open, why it looks so, from what, and what outlives it on this worker."""

    generation: Generation
    choice: PlanChoice
    profile: Profile | None
    worker: Worker


def start_job(request: StartRequest, world: World, publish: Publish) -> StartedJob:
    """Bring a job to its first generation. Call it on every worker.

    Raises:
        UserError: the model, the data or the layout cannot work, or workers were given different settings.
        CheckFailed, WeightsDiffer: see ``varuna.errors``.
        PeerLost: another worker gave up.
    """
    job = request.job
    if request.layout.micro_batch_size is not None:  # on every worker, before one waits for another
        check_micro_batch_size(request.layout.micro_batch_size, job.batch_size)
    compare_versions(world)
    compare_settings(
        world,
        {
            "batch_size": job.batch_size,
            "seed": job.seed,
            "precision": request.precision.value,
            "the dataset's length": len(job.dataset),
            "the steps to trace": [request.traced_steps.start, request.traced_steps.stop],
        },
    )
    convert_model(request.model, request.precision)
    shapes = _Shapes()
    signature = agree_on_signature(world, lambda: shapes.read(request))
    partitions = _capture(request, world, signature, publish)
    planned = _plan(request, world, partitions, shapes.example, publish)
    plan = planned.choice.plan
    _verify(request, world, partitions.reference, shapes.example, publish)
    holding = ParameterHolding(request.model, request.optimizer)
    _place(request, world, holding, partitions, plan)
    stage = plan.stage_of(world.rank)
    worker = Worker(
        model=request.model,
        holding=holding,
        partitions=partitions,
        job=request.job,
        world=world,
        held_sections=set() if stage is None else set(range(stage.first_section, stage.end_section)),
    )
    first_step = request.begin(worker)
    generation = Generation(
        index=0, world=world, plan=plan, job=request.job, partitions=partitions, parameters=holding.held
    )
    generation.open(first_step)
    _refine(request, world, planned, lambda: worker.world is world)
    profile = None if planned.profiled is None else planned.profiled.profile
    return StartedJob(generation=generation, choice=planned.choice, profile=profile, worker=worker)


def start_newcomer(request: StartRequest, world: World, publish: Publish) -> Worker:
    """A worker that joins a job at work: everything captured, nothing held yet.

    Args:
        request: as on every worker.
        world: this worker alone; it gets its rank when it gets a place.
        publish: hears of the capture.
    """
    convert_model(request.model, request.precision)
    alone = replace(world, rank=0, size=1)
    partitions = _capture(request, alone, _Shapes().read(request), publish)
    holding = ParameterHolding(request.model, request.optimizer)
    holding.keep_only(())
    return Worker(model=request.model, holding=holding, partitions=partitions, job=request.job, world=world)


def averaged_buffers(section: Section) -> list[str]:
    """Buffers that forward changes in a way that cannot be joined exactly."""
    return [name for name, rule in section.mutated_buffers.items() if rule.kind == "mean"]


class _Shapes:
    """Reads the first samples, on worker 0 only, and keeps them for the check."""

    def __init__(self) -> None:
        self.example: Any = None

    def read(self, request: StartRequest) -> InputSignature:
        job = request.job
        probe = probe_first_batch(
            job.dataset,
            job.collate_fn,
            seed=job.seed,
            batch_size=job.batch_size,
            num_samples=min(EXAMPLE_NUM_SAMPLES, job.batch_size),
        )
        self.example = probe.batch
        return signature_of(probe.batch, probe.num_samples)


def _capture(request: StartRequest, world: World, signature: InputSignature, publish: Publish) -> Partitions:
    started_s = time.monotonic()
    partitions = Partitions(request.model, signature, request.options, world.device)
    reference = leader_first(world, "train", lambda: partitions.reference)
    compare_partitions(world, reference)
    publish(
        CaptureFinished(
            sections=reference.specs,
            duration_s=time.monotonic() - started_s,
            from_cache=reference.from_cache,
        )
    )
    return partitions


def _plan(
    request: StartRequest, world: World, partitions: Partitions, example: Any, publish: Publish
) -> Planned:
    tensors = None if example is None else flatten_batch(example).tensors
    planned = plan_job(request, world, partitions, tensors, publish)
    choice = planned.choice
    averaged = [name for section in partitions.reference.sections for name in averaged_buffers(section)]
    if averaged and len(choice.plan.pipelines) > 1:
        publish(
            Notice(
                text=f"forward changes {', '.join(averaged[:4])} in a way that is not a running average: "
                f"with {len(choice.plan.pipelines)} pipelines they become the mean over pipelines, which one "
                f"process would not give."
            )
        )
    publish(PlanChosen(generation=0, plan=choice.plan, reason=choice.reason))
    return planned


def _refine(request: StartRequest, world: World, planned: Planned, is_current: Callable[[], bool]) -> None:
    """Let the steps of this plan make the profile better that it was made from."""
    profiled = planned.profiled
    if profiled is not None:
        refiner = StageRefiner(world, planned.choice.plan, profiled.profile, profiled.path, is_current)
        request.job.spans.subscribe(refiner)


def _verify(request: StartRequest, world: World, reference: Partition, example: Any, publish: Publish) -> None:
    """Before any parameter is given up: equal weights everywhere, a split step equal to the plain one."""
    model = request.model
    if not is_on_meta(model):
        given = () if request.initial is None else request.initial.names
        compare_weights(world, reference, given=given)
    if not request.check or world.rank != 0:
        return
    reason = why_not_checked(model, reference, world.device, available_bytes(world.device))
    difference = 0.0
    if not reason:
        model.to(world.device)
        try:
            difference = check_split(
                model, reference, example, autocast=request.job.autocast, loss_fn=request.options.loss_fn
            )
        except CheckFailed as error:
            if not reference.from_cache:
                raise
            raise CheckFailed(
                f"{error} The graph came from the cache, {request.options.cache_dir}: if the model has changed "
                f"in a way that its source does not show, remove that folder and start again."
            ) from error
    publish(CheckFinished(max_difference=difference, skipped_reason=reason))


def _place(
    request: StartRequest, world: World, holding: ParameterHolding, partitions: Partitions, plan: Plan
) -> None:
    """Keep what this worker's stage needs, where it computes; give up the rest."""
    names: Sequence[str] = held_names(plan, partitions, world.rank)
    holding.keep_only(names)
    missing = [name for name in names if name not in holding.held]
    buffers = held_buffers(plan, partitions, world.rank)
    if request.initial is not None:
        kept = unread_buffers(request.model, partitions)
        give_values(request.model, request.initial, [*names, *buffers, *kept], world.device)
    materialise(
        request.model,
        [*names, *buffers],
        seed=request.job.seed,
        device=world.device,
        init_weights=request.init_weights,
    )
    holding.adopt(missing)
    return_memory()
    reset_peak_memory(world.device)  # from now on the peak is that of training
