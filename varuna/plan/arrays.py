"""A pipeline of a plan, on given machines, as the numbers that ``pipeline.run_pipeline`` takes.

Links: two workers on one machine have the profile's ``within_machine`` link between them, others its
``across_machines`` one. Streams that leave one machine share ``shared_bytes_per_s`` (``sharing.py``). How often
a stream sends is what its message takes alone over the time between two messages, which is that of the
pipeline's slowest stage. So streams that are seldom busy hardly slow each other, and those that are always busy
divide the link evenly.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from varuna.plan.costs import StageCosts, backward_task_s
from varuna.plan.decide import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from varuna.plan.kernel import ACTIVATION, GRADIENT, NUM_KINDS, Floats
from varuna.plan.pace import Draw, drawn_paces
from varuna.plan.pipeline import NO_DELAYS, PipelineArrays, draw_delays, rules_of
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.schedule import StageSchedule, stage_schedule
from varuna.plan.sharing import slowdowns
from varuna.spec import PipelineSpec, Plan, StageSpec

CostsOf = Callable[[int, int, int], StageCosts]
"""(first_section, end_section, micro_batch_size) -> costs."""


@dataclass(frozen=True, kw_only=True)
class StageShape:
    """A stage without its worker; ``speed`` is that of its device."""

    first_section: int
    end_section: int
    recompute: bool
    max_in_flight: int
    speed: float


@dataclass(frozen=True, kw_only=True)
class Hop:
    """Between a stage and the next: whether it crosses machines, and how much slower sharing makes each way."""

    across_machines: bool
    activation_slowdown: float = 1.0
    gradient_slowdown: float = 1.0


@dataclass(frozen=True, kw_only=True)
class PipelineShape:
    """All that a pipeline's times depend on: those with equal shapes are alike.

    Attributes:
        schedule: its name.
        stages, hops: P and P - 1 of them.
        num_micro_batches, micro_batch_size: N and m.
        last_size: samples of the last micro-batch, at most m.
    """

    schedule: str
    stages: tuple[StageShape, ...]
    hops: tuple[Hop, ...]
    num_micro_batches: int
    micro_batch_size: int
    last_size: int

    def schedules(self) -> tuple[StageSchedule, ...]:
        """One for each stage."""
        return tuple(
            stage_schedule(
                self.schedule,
                num_stages=len(self.stages),
                stage_index=index,
                num_micro_batches=self.num_micro_batches,
                recompute=[stage.recompute for stage in self.stages],
                max_in_flight=stage.max_in_flight,
            )
            for index, stage in enumerate(self.stages)
        )


def shapes_of(
    plan: Plan, profile: Profile, machines: Sequence[int], speeds: Sequence[float], costs_of: CostsOf
) -> tuple[PipelineShape, ...]:
    """The shape of every pipeline, the same object for those that are alike.

    ``machines`` and ``speeds`` are per worker.
    """
    known: dict[Hashable, PipelineShape] = {}
    shapes = []
    for pipeline in plan.pipelines:
        workers = [stage.worker_index for stage in pipeline.stages]
        crosses = tuple(machines[a] != machines[b] for a, b in pairwise(workers))
        last_size = len(plan.micro_batch_samples(pipeline.end_micro_batch - 1))
        stages = tuple(
            (stage.first_section, stage.end_section, stage.recompute, stage.max_in_flight, speeds[worker])
            for stage, worker in zip(pipeline.stages, workers, strict=True)
        )
        key = (stages, crosses, pipeline.num_micro_batches, last_size)
        if key not in known:
            known[key] = PipelineShape(
                schedule=plan.schedule,
                stages=tuple(_stage_shape(stage, speeds[stage.worker_index]) for stage in pipeline.stages),
                hops=tuple(Hop(across_machines=crosses_here) for crosses_here in crosses),
                num_micro_batches=pipeline.num_micro_batches,
                micro_batch_size=plan.micro_batch_size,
                last_size=last_size,
            )
        shapes.append(known[key])
    if profile.across_machines.shared_bytes_per_s > 0:
        return _with_sharing(plan.pipelines, shapes, profile, machines, costs_of)
    return tuple(shapes)


def _stage_shape(stage: StageSpec, speed: float) -> StageShape:
    return StageShape(
        first_section=stage.first_section,
        end_section=stage.end_section,
        recompute=stage.recompute,
        max_in_flight=stage.max_in_flight,
        speed=speed,
    )


def _with_sharing(
    pipelines: Sequence[PipelineSpec],
    shapes: Sequence[PipelineShape],
    profile: Profile,
    machines: Sequence[int],
    costs_of: CostsOf,
) -> tuple[PipelineShape, ...]:
    """Slow streams down by the others that leave the same machine (see the module's text)."""
    link = profile.across_machines
    shares_of = {id(shape): _busy_shares(shape, link, costs_of) for shape in _distinct(shapes)}
    crossing_of = {
        id(shape): [index for index, hop in enumerate(shape.hops) if hop.across_machines]
        for shape in _distinct(shapes)
    }
    leaves: list[int] = []
    used: list[float] = []
    for pipeline, shape in zip(pipelines, shapes, strict=True):
        shares = shares_of[id(shape)]
        for index in crossing_of[id(shape)]:
            for direction in (ACTIVATION, GRADIENT):
                leaves.append(machines[pipeline.stages[index + direction].worker_index])
                used.append(shares[index][direction])
    streams_alone = link.shared_bytes_per_s / link.bytes_per_s
    factors = slowdowns(np.array(leaves, dtype=np.int64), np.array(used), streams_alone).tolist()
    slowed: dict[Hashable, PipelineShape] = {}
    found = []
    first = 0
    for shape in shapes:
        crossing = crossing_of[id(shape)]
        own = tuple(factors[first : first + 2 * len(crossing)])
        first += len(own)
        key = (id(shape), own)
        if key not in slowed:
            slowed[key] = _slowed(shape, crossing, own)
        found.append(slowed[key])
    return tuple(found)


def _distinct(shapes: Sequence[PipelineShape]) -> list[PipelineShape]:
    return list({id(shape): shape for shape in shapes}.values())


def _slowed(shape: PipelineShape, crossing: Sequence[int], factors: Sequence[float]) -> PipelineShape:
    """With a factor for each way of each hop in ``crossing``."""
    hops = list(shape.hops)
    for index, activation, gradient in zip(crossing, factors[::2], factors[1::2], strict=True):
        hops[index] = Hop(across_machines=True, activation_slowdown=activation, gradient_slowdown=gradient)
    return replace(shape, hops=tuple(hops))


def _busy_shares(shape: PipelineShape, link: LinkProfile, costs_of: CostsOf) -> list[tuple[float, float]]:
    """Per hop and direction, the share of time in which it sends, if it is alone."""
    costs = [costs_of(stage.first_section, stage.end_section, shape.micro_batch_size) for stage in shape.stages]
    cycle_s = max(
        (cost.forward_s + cost.backward_s + (cost.recompute_s if stage.recompute else 0.0)) / stage.speed
        for cost, stage in zip(costs, shape.stages, strict=True)
    )
    per_byte = 1.0 / link.bytes_per_s / max(cycle_s, 1e-12)
    return [
        (min(1.0, cost.output_bytes * per_byte), min(1.0, cost.gradient_bytes * per_byte))
        for cost in costs[:-1]
    ]


def arrays_of(
    shape: PipelineShape, profile: Profile, costs_of: CostsOf, start_s: Floats, draw: Draw
) -> PipelineArrays:
    """The numbers of one pipeline; ``start_s`` per stage; ``draw``: of delays and paces, if there are any."""
    num_stages = len(shape.stages)
    schedules = shape.schedules()
    durations_s = np.zeros((num_stages, 2, NUM_KINDS))
    transmit_s = np.zeros((num_stages, 2, 2))
    latency_s = np.zeros((num_stages, 2))
    send_s = np.zeros((num_stages, 2))
    kept_bytes = np.zeros((num_stages, 3))
    quantiles: list[Sequence[float]] = [()] * (2 * num_stages)
    for index, stage in enumerate(shape.stages):
        for is_last, size in enumerate((shape.micro_batch_size, shape.last_size)):
            costs = costs_of(stage.first_section, stage.end_section, size)
            durations_s[index, is_last] = _durations_s(costs, schedules[index].split) / stage.speed
            for direction, hop, num_bytes, slowdown in _channels(shape, index, costs):
                link = _link(profile, hop)
                transmit_s[index, direction, is_last] = num_bytes / link.bytes_per_s * slowdown
                latency_s[index, direction] = link.latency_s
                send_s[index, direction] = link.send_s
                quantiles[2 * index + direction] = link.jitter_s
        costs = costs_of(stage.first_section, stage.end_section, shape.micro_batch_size)
        kept_bytes[index] = _kept_bytes(costs, recompute=schedules[index].recompute)
    paces = drawn_paces(profile, shape.num_micro_batches * _busy_s(durations_s[:, 0], schedules), draw)
    durations_s *= paces[:, None, None]
    durations_s[:, :, FORWARD:] += profile.task_overhead_s
    seed = (draw.seed, draw.run, draw.pipeline)
    return PipelineArrays(
        num_micro_batches=shape.num_micro_batches,
        rules=rules_of(schedules),
        durations_s=durations_s,
        transmit_s=transmit_s,
        latency_s=latency_s,
        send_s=send_s,
        delays_s=draw_delays(quantiles, shape.num_micro_batches, seed) if any(quantiles) else NO_DELAYS,
        start_s=start_s,
        kept_bytes=kept_bytes,
    )


def _durations_s(costs: StageCosts, split: bool) -> Floats:
    durations_s = np.zeros(NUM_KINDS)
    durations_s[FORWARD] = costs.forward_s
    durations_s[RECOMPUTE] = costs.recompute_s
    durations_s[BACKWARD] = backward_task_s(costs, split=split)
    durations_s[WEIGHT] = costs.weight_s
    return durations_s


def _busy_s(durations_s: Floats, schedules: Sequence[StageSchedule]) -> Floats:
    """Seconds of one micro-batch per stage."""
    runs = np.zeros_like(durations_s)
    runs[:, (FORWARD, BACKWARD)] = 1
    runs[:, RECOMPUTE] = [schedule.recompute for schedule in schedules]
    runs[:, WEIGHT] = [schedule.split for schedule in schedules]
    return np.asarray((durations_s * runs).sum(axis=1))


def _channels(shape: PipelineShape, index: int, costs: StageCosts) -> list[tuple[int, Hop, int, float]]:
    """What a stage sends: direction, hop, bytes of a message, slowdown."""
    channels = []
    if index < len(shape.hops):
        hop = shape.hops[index]
        channels.append((ACTIVATION, hop, costs.output_bytes, hop.activation_slowdown))
    if index > 0:
        hop = shape.hops[index - 1]
        channels.append((GRADIENT, hop, costs.returned_bytes, hop.gradient_slowdown))
    return channels


def _link(profile: Profile, hop: Hop) -> LinkProfile:
    return profile.across_machines if hop.across_machines else profile.within_machine


def _kept_bytes(costs: StageCosts, *, recompute: bool) -> tuple[int, int, int]:
    in_flight = costs.received_bytes + (0 if recompute else costs.activation_bytes)
    return in_flight, costs.activation_bytes if recompute else 0, costs.weight_bytes
