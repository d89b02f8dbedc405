"""Which plan a job starts with: from a profile if something is left to choose, else laid out as asked for."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING

from torch import Tensor

from varuna.config import LayoutConfig, ProfileConfig
from varuna.events import ProfileMeasured
from varuna.plan import PlanChoice, simple_plan
from varuna.plan.profile_file import write_profile
from varuna.run.partitions import Partitions
from varuna.run.profiling import Profiled, ProfileRequest, obtain_profile
from varuna.run.startup import agree_on_plan, worker_memory_bytes
from varuna.run.world import World

if TYPE_CHECKING:
    from varuna.run.start import Publish, StartRequest


class ProfileWritten(SystemExit):
    """The profile that was asked for is in its file: the script ends here, in good order, on every worker."""

    def __init__(self) -> None:
        super().__init__(0)


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
    config, layout = request.profile, request.layout
    num_sections = len(partitions.reference.sections)
    if needs_profile(config, layout, world.size, num_sections, request.job.batch_size):
        profiled = _profile(request, world, partitions, example)
        publish(
            ProfileMeasured(
                num_sections=num_sections,
                duration_s=profiled.duration_s,
                from_cache=profiled.from_cache,
                num_refinements=profiled.profile.num_refinements,
            )
        )
    if config.output is not None:
        assert profiled is not None
        if world.rank == 0:
            write_profile(profiled.profile, config.output)
        raise ProfileWritten

    def choose() -> PlanChoice:
        if profiled is None:
            return _plain_choice(request, world, partitions)
        from varuna.plan.choose import choose_plan  # with a compiler, which other workers do not need

        return choose_plan(
            profiled.profile,
            profiled.cluster,
            batch_size=request.job.batch_size,
            num_stages=layout.num_stages,
            micro_batch_size=layout.micro_batch_size,
            schedule=layout.schedule,
            recompute=layout.recompute,
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


def _profile(
    request: StartRequest, world: World, partitions: Partitions, example: Mapping[str, Tensor] | None
) -> Profiled:
    cache = request.options.cache_dir
    sizes = request.profile.micro_batch_sizes
    if not sizes and request.layout.micro_batch_size is not None:
        sizes = (request.layout.micro_batch_size,)
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
            micro_batch_sizes=sizes,
            is_fresh=request.profile.output is not None,
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
