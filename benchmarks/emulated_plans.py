"""Runs a plan with stages that sleep as long as a profile says, on a real or switched network.

Everything else is Varuna's own: engine, channels, measuring of links. So a profile taken beforehand and a step
measured afterwards can be compared.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import torch
from torch.distributed import PrefixStore, TCPStore

from benchmarks import sleeping, workers
from benchmarks.sleeping import Network
from varuna.plan import simple_plan, stage_schedule
from varuna.plan.costs import stage_costs
from varuna.plan.profile import LinkProfile, Profile, SectionProfile, TaskCosts
from varuna.plan.simulate import StageTimes
from varuna.run.channel import open_channels
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.engine import StepContext, run_stage
from varuna.run.links import measure_links
from varuna.run.world import World
from varuna.spec import Plan, SectionSpec, StagePosition
from varuna.testing.emulated import EmulatedStage

_CALIBRATED_BYTES = 1 << 20


def emulated_profile(
    costs: Sequence[Sequence[TaskCosts]], link: LinkProfile, *, task_overhead_s: float = 0.0
) -> Profile:
    """A profile of sections without parameters; per section, its costs for ascending micro-batch sizes."""
    sections = tuple(
        SectionProfile(
            index=index, name=f"section {index}", parameter_bytes=0, gradient_bytes=0, optimizer_bytes=0,
            update_s=0.0, costs=tuple(of_section),
        )
        for index, of_section in enumerate(costs)
    )  # fmt: skip
    return Profile(
        model="emulated", key="emulated", device="cpu", precision="fp32", device_memory_bytes=1 << 40,
        sections=sections, within_machine=link, across_machines=link, task_overhead_s=task_overhead_s,
    )  # fmt: skip


def plan_of(
    profile: Profile, *, num_workers: int, num_stages: int, batch_size: int, micro_batch_size: int,
    schedule: str, recompute: bool = False, by_count: bool = False,
) -> Plan:  # fmt: skip
    """Stages with equal shares of forward time, or of sections; as many pipelines as there are workers for."""
    sections = [
        SectionSpec(
            index=section.index, name=section.name, parameter_names=(), parameter_bytes=0,
            forward_flops=1.0 if by_count else section.costs[0].forward_s, output_bytes=0,
        )
        for section in profile.sections
    ]  # fmt: skip
    choice = simple_plan(
        sections=sections, num_workers=num_workers, batch_size=batch_size, num_stages=num_stages,
        micro_batch_size=micro_batch_size, schedule=schedule, recompute=recompute,
    )  # fmt: skip
    return choice.plan


def calibrate(profile: Profile, network: Network) -> Profile:
    """The same with what this network and this engine really take, measured before anything else runs."""
    port = workers.free_port()

    def measure(rank: int) -> dict[str, object]:
        _sleep_exactly()
        place = sleeping.place_on(network, rank, port)
        store = TCPStore(place.store_host, place.store_port, is_master=rank == 0, wait_for_workers=False)
        world = World(rank=rank, size=2, local_rank=rank, store=PrefixStore("links", store), address=place.host)
        link = measure_links(world, (0, 0), b"benchmark", _CALIBRATED_BYTES).within_machine
        return {} if link is None else {name: getattr(link, name) for name in link.__dataclass_fields__}

    found = sleeping.run_on(network, 2, measure)[0]
    link = LinkProfile(**{**found, "jitter_s": tuple(found["jitter_s"])})
    return replace(
        profile, within_machine=link, across_machines=link, task_overhead_s=measure_task_overhead_s()
    )


def measure_task_overhead_s() -> float:
    """What a task takes beyond its sleep, from a pipeline of one stage."""
    seconds, num_micro_batches = 0.005, 16
    cost = TaskCosts(micro_batch_size=1, forward_s=seconds, recompute_s=0.0, backward_s=seconds)
    profile = emulated_profile([[cost]], LinkProfile(latency_s=0.0, bytes_per_s=1.0))
    plan = plan_of(
        profile, num_workers=1, num_stages=1, batch_size=num_micro_batches, micro_batch_size=1, schedule="1f1b"
    )
    step_s = measure_step_s(plan, profile, Network(), rounds=3)
    return max(0.0, step_s / (2 * num_micro_batches) - seconds)


def measure_step_s(plan: Plan, profile: Profile, network: Network, *, rounds: int) -> float:
    """Median seconds of a step over all workers, after one step of warm-up, in fresh processes."""
    port = workers.free_port()
    line = workers.StartLine(plan.num_workers)

    def work(rank: int) -> list[list[float]]:
        _sleep_exactly()
        place = sleeping.place_on(network, rank, port)
        store = TCPStore(place.store_host, place.store_port, is_master=rank == 0, wait_for_workers=False)
        position = plan.position_of(rank)
        worker = None if position is None else _Worker(plan, profile, position, place, store)
        spans = []
        for round_index in range(rounds + 1):
            start_s = line.start(rank, round_index + 1)
            if worker is not None:
                worker.run_step(round_index)
                spans.append([start_s, time.monotonic()])
        line.start(rank, rounds + 2)
        if worker is not None:
            worker.close()
        return spans[1:]

    spans = [of_worker for of_worker in sleeping.run_on(network, plan.num_workers, work) if of_worker]
    return statistics.median(
        max(of_worker[index][1] for of_worker in spans) - min(of_worker[index][0] for of_worker in spans)
        for index in range(rounds)
    )


class _Worker:
    """One stage: engine and channels, and a program that sleeps."""

    def __init__(
        self, plan: Plan, profile: Profile, position: StagePosition, place: workers.Place, store: TCPStore
    ) -> None:
        pipeline = plan.pipelines[position.pipeline_index]
        at, last = position.stage_index, len(pipeline.stages) - 1
        spec = pipeline.stages[at]
        costs = stage_costs(profile, spec.first_section, spec.end_section, plan.micro_batch_size)
        self._position = position
        self._rank = place.rank
        self._schedule = stage_schedule(
            plan.schedule, num_stages=last + 1, stage_index=at, num_micro_batches=pipeline.num_micro_batches,
            recompute=[stage.recompute for stage in pipeline.stages], max_in_flight=spec.max_in_flight,
        )  # fmt: skip
        self._stage = EmulatedStage(
            StageTimes(
                forward_s=costs.forward_s, backward_s=costs.backward_s, recompute_s=costs.recompute_s,
                weight_s=costs.weight_s,
            ),
            activation_bytes=costs.output_bytes or costs.received_bytes,
            is_first=at == 0,
            is_last=at == last,
        )  # fmt: skip
        address = StageAddress(
            rank=place.rank, stage_index=at,
            previous_rank=pipeline.stages[at - 1].worker_index if at > 0 else None,
            next_rank=pipeline.stages[at + 1].worker_index if at < last else None,
        )  # fmt: skip
        options = ConnectOptions(generation=0, token=b"benchmark", host=place.host)
        self._channels = None
        if last > 0:
            self._channels = open_channels(PrefixStore("generation-0", store), address, options)

    def run_step(self, step_index: int) -> None:
        """All tasks of one step."""
        context = StepContext(
            generation=0, step_index=step_index, operation="train", first_micro_batch=0, rank=self._rank,
            pipeline_index=self._position.pipeline_index, stage_index=self._position.stage_index,
        )  # fmt: skip
        run_stage(self._stage, self._schedule, self._channels, context=context)

    def close(self) -> None:
        """Part from the neighbours."""
        if self._channels is not None:
            self._channels.close()


def _sleep_exactly() -> None:
    """By default Linux may end a sleep 50 µs late to save wake-ups; a task shall take its stated time."""
    torch.set_num_threads(1)
    Path("/proc/self/timerslack_ns").write_text("1")
