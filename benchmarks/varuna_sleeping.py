"""Varuna's engine over stages that sleep instead of computing: the same pipeline as ``torch_sleeping``."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from torch.distributed import PrefixStore, TCPStore

from benchmarks.torch_sleeping import SleepingPipeline
from benchmarks.workers import Place
from varuna.plan import StageSchedule, pipeline_schedules
from varuna.plan.simulate import StageTimes, ideal_makespan
from varuna.run.channel import open_channels
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.engine import StepContext, run_stage
from varuna.testing.emulated import EmulatedStage

VARUNA_SCHEDULES = ("varuna", "1f1b", "gpipe", "zero-bubble")


def schedules(name: str, pipeline: SleepingPipeline) -> tuple[StageSchedule, ...]:
    """The schedule of every stage, with its own default of micro-batches in flight."""
    return tuple(
        pipeline_schedules(
            name,
            num_stages=pipeline.num_stages,
            num_micro_batches=pipeline.num_micro_batches,
            recompute=[pipeline.recompute] * pipeline.num_stages,
        )
    )


def stage_times(pipeline: SleepingPipeline) -> list[StageTimes]:
    """Seconds per task of every stage; recompute takes what forward takes, weights half of backward."""
    return [
        StageTimes(
            forward_s=pipeline.forward_s * pipeline.factor(index),
            backward_s=pipeline.backward_s * pipeline.factor(index),
            recompute_s=pipeline.forward_s * pipeline.factor(index),
            weight_s=pipeline.backward_s / 2 * pipeline.factor(index),
        )
        for index in range(pipeline.num_stages)
    ]


def ideal_s(name: str, pipeline: SleepingPipeline) -> float:
    """Makespan of a schedule if messages took no time."""
    return ideal_makespan(
        name,
        times=stage_times(pipeline),
        num_micro_batches=pipeline.num_micro_batches,
        recompute=[pipeline.recompute] * pipeline.num_stages,
    )


def in_flight(name: str, pipeline: SleepingPipeline) -> list[int]:
    """Most micro-batches between forward and backward that each stage may hold."""
    return [schedule.max_in_flight for schedule in schedules(name, pipeline)]


@contextmanager
def engine(name: str, place: Place, pipeline: SleepingPipeline) -> Iterator[Callable[[], None]]:
    """Yields a function that runs one step on this rank."""
    rank = place.rank
    schedule = schedules(name, pipeline)[rank]
    stage = EmulatedStage(
        stage_times(pipeline)[rank],
        activation_bytes=4 * pipeline.num_values,
        is_first=schedule.is_first,
        is_last=schedule.is_last,
    )
    store = TCPStore(place.store_host, place.store_port, is_master=rank == 0, wait_for_workers=False)
    stage_address = StageAddress(
        rank=rank,
        stage_index=rank,
        previous_rank=rank - 1 if rank > 0 else None,
        next_rank=None if schedule.is_last else rank + 1,
    )
    options = ConnectOptions(generation=0, token=b"benchmark", host=place.host)
    channels = open_channels(PrefixStore("generation-0", store), stage_address, options)
    step_indices = itertools.count()

    def run_once() -> None:
        context = StepContext(
            generation=0,
            step_index=next(step_indices),
            operation="train",
            first_micro_batch=0,
            rank=rank,
            stage_index=rank,
        )
        run_stage(stage, schedule, channels, context=context)

    try:
        yield run_once
    finally:
        channels.close()
