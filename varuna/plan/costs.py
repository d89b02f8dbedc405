"""Reads numbers out of a profile: what a stage, a message and an all-reduce cost. Pure functions.

Micro-batch sizes that were not measured: between two measured ones linear; above the largest along the line of
the two largest; below the smallest along the line of the two smallest, but never less than in proportion (no
samples at all cost nothing or more). With one measured size everything is in proportion to it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields

from varuna.errors import PlanError
from varuna.plan.profile import AllReducePoint, LinkProfile, Profile, SectionProfile, TaskCosts


@dataclass(frozen=True, kw_only=True)
class StageCosts:
    """What a run of sections costs on one worker at one micro-batch size.

    Attributes:
        forward_s, recompute_s, backward_s, weight_s: sums over its sections, as in ``TaskCosts``:
            ``backward_s`` is the whole backward, of which a split one puts off ``weight_s``.
        split_s: what a split backward takes on top, likewise.
        activation_bytes, weight_bytes: sums of what is kept, as in ``TaskCosts``; without the received input.
        workspace_bytes: of the section that needs most.
        received_bytes, returned_bytes: at the cut before it, forward and backward; 0 on the first stage.
        output_bytes, gradient_bytes: at the cut after it, forward and backward; 0 on the last stage.
    """

    forward_s: float
    recompute_s: float
    backward_s: float
    weight_s: float
    split_s: float
    activation_bytes: int
    weight_bytes: int
    workspace_bytes: int
    received_bytes: int
    returned_bytes: int
    output_bytes: int
    gradient_bytes: int


def backward_task_s(costs: StageCosts, *, split: bool) -> float:
    """Seconds of the backward task: all of it, or its first part."""
    return costs.backward_s - costs.weight_s + costs.split_s if split else costs.backward_s


def stage_costs(profile: Profile, first_section: int, end_section: int, micro_batch_size: int) -> StageCosts:
    """Costs of sections ``first_section <= i < end_section`` for micro-batches of that many samples."""
    costs = [
        section_costs(section, micro_batch_size) for section in profile.sections[first_section:end_section]
    ]
    before = section_costs(profile.sections[first_section - 1], micro_batch_size) if first_section else None
    return StageCosts(
        forward_s=sum(cost.forward_s for cost in costs),
        recompute_s=sum(cost.recompute_s for cost in costs),
        backward_s=sum(cost.backward_s for cost in costs),
        weight_s=sum(cost.weight_s for cost in costs),
        split_s=sum(cost.split_s for cost in costs),
        activation_bytes=sum(cost.activation_bytes for cost in costs),
        weight_bytes=sum(cost.weight_bytes for cost in costs),
        workspace_bytes=max(cost.workspace_bytes for cost in costs),
        received_bytes=before.output_bytes if before else 0,
        returned_bytes=before.gradient_bytes if before else 0,
        output_bytes=costs[-1].output_bytes,
        gradient_bytes=costs[-1].gradient_bytes,
    )


def section_costs(section: SectionProfile, micro_batch_size: int) -> TaskCosts:
    """Costs of one section at any micro-batch size, from those measured (see the module's text)."""
    for cost in section.costs:
        if cost.micro_batch_size == micro_batch_size:
            return cost
    if micro_batch_size < 1 or not section.costs:
        raise PlanError(
            f"Section {section.index} ({section.name}) has {len(section.costs)} measured micro-batch sizes, "
            f"and costs for micro-batches of {micro_batch_size} are asked for. Both must be at least 1."
        )
    sizes = [cost.micro_batch_size for cost in section.costs]
    values = {
        field.name: _at(sizes, [getattr(cost, field.name) for cost in section.costs], micro_batch_size)
        for field in fields(TaskCosts)
        if field.name != "micro_batch_size"
    }
    rounded = {name: round(value) if name.endswith("_bytes") else value for name, value in values.items()}
    return TaskCosts(micro_batch_size=micro_batch_size, **rounded)  # type: ignore[arg-type]


def all_reduce_s(profile: Profile, num_workers: int, num_bytes: float, across_machines: bool) -> float:
    """Seconds of one all-reduce: from points measured with the nearest number of workers, else from the links.

    Between measured sizes it is linear. For another number of workers than any measured one, the measured time
    is scaled by the ratio that the links' numbers give.
    """
    if num_workers < 2 or num_bytes <= 0:
        return 0.0
    points = [point for point in profile.all_reduce if point.across_machines == across_machines]
    if not points:
        return _from_links_s(profile, num_workers, num_bytes, across_machines)
    nearest = min((point.num_workers for point in points), key=lambda n: (abs(n - num_workers), n))
    measured_s = _measured_s([point for point in points if point.num_workers == nearest], num_bytes)
    if nearest == num_workers:
        return measured_s
    wanted_s = _from_links_s(profile, num_workers, num_bytes, across_machines)
    return measured_s * wanted_s / _from_links_s(profile, nearest, num_bytes, across_machines)


def message_s(link: LinkProfile, num_bytes: float) -> float:
    """Seconds that a message takes when it is alone on its link and not delayed."""
    return link.latency_s + num_bytes / link.bytes_per_s


def _measured_s(points: Sequence[AllReducePoint], num_bytes: float) -> float:
    points = sorted(points, key=lambda point: point.num_bytes)
    return _at([point.num_bytes for point in points], [point.seconds for point in points], num_bytes)


def _from_links_s(profile: Profile, num_workers: int, num_bytes: float, across_machines: bool) -> float:
    """A ring: 2 (n - 1) messages one after the other, each of one n-th of the bytes. That is what gloo does.

    NCCL (any device but ``cpu``) may use trees instead: 2 log2 n messages, all bytes up and down.
    """
    link = profile.across_machines if across_machines else profile.within_machine
    moved_s = 2 * num_bytes / link.bytes_per_s
    ring_s = 2 * (num_workers - 1) * link.latency_s + moved_s * (num_workers - 1) / num_workers
    if profile.device == "cpu":
        return ring_s
    return min(ring_s, 2 * math.ceil(math.log2(num_workers)) * link.latency_s + moved_s)


def _at(sizes: Sequence[int], values: Sequence[float], size: float) -> float:
    """The value at ``size``: piecewise linear, extrapolated as the module says; never negative."""
    if len(sizes) == 1:
        return values[0] * size / sizes[0]
    upper = next((index for index, known in enumerate(sizes) if known >= size), len(sizes))
    if 0 < upper < len(sizes):
        share = (size - sizes[upper - 1]) / (sizes[upper] - sizes[upper - 1])
        return values[upper - 1] + share * (values[upper] - values[upper - 1])
    if upper == 0:
        slope = max(0.0, values[1] - values[0]) / (sizes[1] - sizes[0])
        return max(values[0] * size / sizes[0], values[0] - slope * (sizes[0] - size))
    slope = max(0.0, values[-1] - values[-2]) / (sizes[-1] - sizes[-2])
    return values[-1] + slope * (size - sizes[-1])
