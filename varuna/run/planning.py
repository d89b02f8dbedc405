"""Which plan a job starts with: from a profile if something is left to choose, else laid out as asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

import msgspec
from torch import Tensor

from varuna.config import LayoutConfig, ProfileConfig
from varuna.errors import WantedEnd
from varuna.events import ProfileMeasured
from varuna.plan import PlanChoice, simple_plan
from varuna.plan.compiled import wait_for_compiler
from varuna.plan.profile_file import write_profile
from varuna.run.partitions import Partitions
from varuna.run.profiling import Profiled, ProfileRequest, obtain_profile
from varuna.run.startup import agree_on_plan, wait_for, worker_memory_bytes
from varuna.run.world import World

if TYPE_CHECKING:
    from varuna.run.start import Publish, StartRequest


class ProfileWritten(WantedEnd):
    """The profile that was asked for is in its file: the script ends here, in good order, on every worker."""


@dataclass(frozen=True, kw_only=True)
class Planned:
    """The plan, the same on every worker, and the profile it was made from; None if there is none."""

    choice: PlanChoice
    profiled: Profiled | None


def plan_job(
    request: StartRequest,
    world: World,
    partitions: Partitions,
    example: Mapping[str, Tensor] | None,
    publish: Publish,
) -> Planned:
    """Choose the first plan; measure first if there is something to choose. Every worker calls it.

    Args:
        request: what the user gave.
        world: this worker.
        partitions: the model's sections.
        example: tensors of a few samples by key; None but on worker 0.
        publish: hears of the profile.

    Raises:
        ProfileWritten: nothing but a profile was asked for.
        PlanError: what was asked for cannot be laid out, or does not fit.
        WorkerFailed: the model raised while it was measured.
        PeerLost: another worker gave up.
    """
    profiled = None
    layout = request.layout
    intent = _agree_on_intent(request, world, partitions)
    if intent.measures:
        profiled = _profile(request, world, partitions, example, intent)
        publish(
            ProfileMeasured(
                num_sections=len(partitions.reference.sections),
                duration_s=profiled.duration_s,
                from_cache=profiled.from_cache,
                num_refinements=profiled.profile.num_refinements,
            )
        )
    if intent.ends:
        assert profiled is not None
        if world.rank == 0:
            assert request.profile.output is not None
            write_profile(profiled.profile, request.profile.output)
        raise ProfileWritten

    def choose() -> PlanChoice:
        if profiled is None:
            return _plain_choice(request, world, partitions)
        from varuna.plan.choose import choose_plan  # with a compiler, which other workers do not need

        if request.options.cache_dir is not None:
            wait_for_compiler(request.options.cache_dir.parent)
        return choose_plan(
            profiled.profile,
            profiled.cluster,
            batch_size=request.job.batch_size,
            num_stages=layout.num_stages,
            micro_batch_size=layout.micro_batch_size,
            schedule=layout.schedule,
            recompute=layout.recompute,
            patience=10,  # a start takes seconds anyway
        ).to_plan_choice()

    return Planned(choice=agree_on_plan(world, choose), profiled=profiled)


def needs_profile(
    config: ProfileConfig, layout: LayoutConfig, num_workers: int, num_sections: int, batch_size: int
) -> bool:
    """Whether a profile is asked for, or the number of stages or the micro-batch size is to be chosen."""
    if config.output is not None:
        return True
    if config.wanted is not None:
        return config.wanted
    size_is_open = layout.micro_batch_size is None and batch_size > 1
    stages_are_open = layout.num_stages is None and num_workers > 1 and num_sections > 1
    return size_is_open or stages_are_open


@dataclass(frozen=True, kw_only=True)
class _Intent:
    """What this start is to do about a profile: worker 0's word, whatever others were told to do.

    Attributes:
        measures: have one before planning.
        ends: write it to a file, measured now, and train nothing.
        micro_batch_sizes: those to measure; empty: chosen.
    """

    measures: bool
    ends: bool
    micro_batch_sizes: tuple[int, ...]


def _agree_on_intent(request: StartRequest, world: World, partitions: Partitions) -> _Intent:
    if world.rank != 0:
        data = wait_for(world.store, "intent", "worker 0 to capture the model")
        return msgspec.json.decode(data, type=_Intent)
    _plain_choice(request, world, partitions)  # refuses what cannot be laid out, before anything is measured
    config, layout = request.profile, request.layout
    num_sections = len(partitions.reference.sections)
    sizes = config.micro_batch_sizes
    if not sizes and layout.micro_batch_size is not None:
        sizes = (layout.micro_batch_size,)
    intent = _Intent(
        measures=needs_profile(config, layout, world.size, num_sections, request.job.batch_size),
        ends=config.output is not None,
        micro_batch_sizes=sizes,
    )
    if world.size > 1:
        world.store.set("intent", msgspec.json.encode(intent).decode())
    return intent


def _profile(
    request: StartRequest,
    world: World,
    partitions: Partitions,
    example: Mapping[str, Tensor] | None,
    intent: _Intent,
) -> Profiled:
    cache = request.options.cache_dir
    return obtain_profile(
        ProfileRequest(
            model=request.model,
            optimizer=request.optimizer,
            precision=request.precision,
            job=request.job,
            init_weights=request.init_weights,
            config=request.config,
            world=world,
            partitions=partitions,
            example=example,
            directory=None if cache is None else cache.parent / "profiles",
            micro_batch_sizes=intent.micro_batch_sizes,
            is_fresh=intent.ends,
        )
    )


def _plain_choice(request: StartRequest, world: World, partitions: Partitions) -> PlanChoice:
    layout = request.layout
    return simple_plan(
        sections=partitions.reference.specs,
        num_workers=world.size,
        batch_size=request.job.batch_size,
        num_stages=layout.num_stages,
        micro_batch_size=layout.micro_batch_size,
        schedule=layout.schedule,
        recompute=layout.recompute,
        memory_bytes=worker_memory_bytes(request.config, world.device),
    )
