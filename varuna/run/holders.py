"""Who holds which parameter and buffer under a plan: pure functions, the same answer on every worker."""

from __future__ import annotations

from varuna.run.partitions import Partitions
from varuna.spec import Plan


def section_parameters(partitions: Partitions, section_index: int) -> tuple[str, ...]:
    """Parameters that whoever holds a section holds; those that no section uses stay with the first."""
    used = tuple(partitions.reference.sections[section_index].parameters)
    return (*used, *partitions.unused_parameters) if section_index == 0 else used


def parameter_holders(plan: Plan, partitions: Partitions) -> dict[str, tuple[int, ...]]:
    """Every parameter, in order of use, to all workers that hold it through any section."""
    holders: dict[str, set[int]] = {}
    for section in partitions.reference.sections:
        workers = plan.holders_of(section.spec.index)
        for name in section.parameters:
            holders.setdefault(name, set()).update(workers)
    for name in partitions.unused_parameters:
        holders[name] = set(plan.holders_of(0))
    return {name: tuple(sorted(workers)) for name, workers in holders.items()}


def tensor_holders(plan: Plan, partitions: Partitions) -> dict[str, tuple[int, ...]]:
    """Parameters and buffers to the workers that hold them; buffers that no section reads are left out."""
    holders: dict[str, set[int]] = {
        name: set(ranks) for name, ranks in parameter_holders(plan, partitions).items()
    }
    for section in partitions.reference.sections:
        for name in section.buffers:
            holders.setdefault(name, set()).update(plan.holders_of(section.spec.index))
    return {name: tuple(sorted(ranks)) for name, ranks in holders.items()}


def buffer_holders(plan: Plan, partitions: Partitions) -> dict[str, tuple[int, ...]]:
    """Every buffer that forward changes to the workers that hold it."""
    holders: dict[str, set[int]] = {}
    for section in partitions.reference.sections:
        for name in section.mutated_buffers:
            holders.setdefault(name, set()).update(plan.holders_of(section.spec.index))
    return {name: tuple(sorted(workers)) for name, workers in holders.items()}


def held_names(plan: Plan, partitions: Partitions, rank: int) -> tuple[str, ...]:
    """Names of the parameters that a worker holds under a plan."""
    return tuple(name for name, ranks in parameter_holders(plan, partitions).items() if rank in ranks)


def held_buffers(plan: Plan, partitions: Partitions, rank: int) -> tuple[str, ...]:
    """Names of the buffers that a worker's sections read under a plan."""
    stage = plan.stage_of(rank)
    if stage is None:
        return ()
    sections = partitions.reference.sections[stage.first_section : stage.end_section]
    return tuple(dict.fromkeys(name for section in sections for name in section.buffers))
