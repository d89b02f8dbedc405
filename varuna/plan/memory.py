"""How many bytes a stage takes on its device. Pure functions, for predictions and for the search alike."""

from __future__ import annotations

from varuna.plan.costs import StageCosts, stage_costs
from varuna.plan.profile import Profile

BUCKET_BYTES = 8 << 20
"""Size of a gradient bucket (``varuna.run.reduce``): the copy that is in memory twice while it is made."""


def stage_memory_bytes(
    profile: Profile,
    first_section: int,
    end_section: int,
    micro_batch_size: int,
    *,
    recompute: bool,
    peak_in_flight: int,
    peak_held: int = 0,
    num_holders: int = 1,
    peak_waiting: int = 1,
) -> int:
    """Most bytes at one time on the device of a stage.

    Args:
        profile: sizes.
        first_section: the stage holds sections from this one on,
        end_section: up to but without this one.
        micro_batch_size: m.
        recompute: activations are dropped after forward; the effective flag (``StageSchedule.recompute``).
        peak_in_flight: most micro-batches between forward and backward.
        peak_held: most micro-batches between the two parts of a split backward; 0 if backward is not split.
        num_holders: workers with the same sections: if several, gradients travel in buckets.
        peak_waiting: messages of each direction that have arrived and are not used yet.
    """
    costs = stage_costs(profile, first_section, end_section, micro_batch_size)
    kept = peak_in_flight * in_flight_bytes(costs, recompute=recompute) + peak_held * costs.weight_bytes
    if recompute:  # one set of recomputed activations at a time
        kept += costs.activation_bytes
    resident = resident_bytes(profile, first_section, end_section, num_holders=num_holders)
    return stage_bytes(costs, resident, kept_bytes=kept, num_waiting=(peak_waiting, peak_waiting))


def stage_bytes(costs: StageCosts, resident: int, *, kept_bytes: float, num_waiting: tuple[int, int]) -> int:
    """As ``stage_memory_bytes``, where what the schedule keeps is known from a simulation.

    Args:
        costs: of the stage at its micro-batch size.
        resident: ``resident_bytes`` of the stage.
        kept_bytes: most bytes of activations and inputs at one time.
        num_waiting: activations and gradients that have arrived and are not used yet.
    """
    messages = num_waiting[0] * costs.received_bytes + num_waiting[1] * costs.gradient_bytes
    messages += costs.returned_bytes  # what a backward makes, until it is sent
    return resident + round(kept_bytes) + costs.workspace_bytes + messages


def resident_bytes(profile: Profile, first_section: int, end_section: int, *, num_holders: int = 1) -> int:
    """What is there whatever the schedule: runtime, parameters, gradients, optimizer state, one bucket."""
    sections = profile.sections[first_section:end_section]
    gradients = sum(section.gradient_bytes for section in sections)
    optimizer = sum(section.optimizer_bytes for section in sections)
    parameters = sum(section.parameter_bytes for section in sections)
    twice = 0  # a parameter that several sections here use is held once
    for tie in profile.ties:
        uses = sum(first_section <= index < end_section for index in tie.section_indices)
        twice += max(0, uses - 1) * tie.num_bytes
    if parameters:  # gradients and optimizer state of a tied parameter are as its share of the parameters
        share = 1 - twice / parameters
        gradients, optimizer = round(gradients * share), round(optimizer * share)
    bucket = min(BUCKET_BYTES, gradients) if num_holders > 1 else 0
    return profile.runtime_bytes + parameters - twice + gradients + optimizer + bucket


def in_flight_bytes(costs: StageCosts, *, recompute: bool) -> int:
    """What one micro-batch keeps between its forward and its backward."""
    return costs.received_bytes + (0 if recompute else costs.activation_bytes)
