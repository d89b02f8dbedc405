"""Joins what workers measured to one profile. Pure functions of what they sent and of the model's sections."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any

from varuna.partition import Partition
from varuna.plan.profile import AllReducePoint, LinkProfile, TaskCosts, Tie
from varuna.run.links import ASSUMED_LINK, LinkMeasures
from varuna.run.measure import KindCosts


def join_costs(found: Sequence[KindCosts]) -> dict[int, tuple[TaskCosts, ...]]:
    """Per kind and micro-batch size the median over the workers that measured it."""
    by_kind: dict[int, dict[int, list[TaskCosts]]] = {}
    for each in found:
        for costs in each.costs:
            by_kind.setdefault(each.kind, {}).setdefault(costs.micro_batch_size, []).append(costs)
    return {
        kind: tuple(_median(by_size[size]) for size in sorted(by_size)) for kind, by_size in by_kind.items()
    }


def _median(costs: Sequence[TaskCosts]) -> TaskCosts:
    values: dict[str, Any] = {}
    for field in fields(TaskCosts):
        middle = statistics.median(getattr(cost, field.name) for cost in costs)
        values[field.name] = middle if field.name.endswith("_s") else round(middle)
    return TaskCosts(**values)


def ties_of(reference: Partition) -> tuple[Tie, ...]:
    """Parameters that several sections use."""
    users: dict[str, list[int]] = {}
    sizes: dict[str, int] = {}
    for section in reference.sections:
        for name, parameter in section.parameters.items():
            users.setdefault(name, []).append(section.spec.index)
            sizes[name] = parameter.nbytes
    return tuple(
        Tie(name=name, num_bytes=sizes[name], section_indices=tuple(indices))
        for name, indices in users.items()
        if len(indices) > 1
    )


@dataclass(frozen=True, kw_only=True)
class JoinedLinks:
    """All links, those assumed included, and what to say about them."""

    within: LinkProfile
    across: LinkProfile
    all_reduce: tuple[AllReducePoint, ...]
    notes: tuple[str, ...]

    @staticmethod
    def of(found: Sequence[LinkMeasures], num_workers: int) -> JoinedLinks:
        """From every worker's measures; a class of links that nobody measured is taken to be as the other."""
        within = next((each.within_machine for each in found if each.within_machine), None)
        across = next((each.across_machines for each in found if each.across_machines), None)
        notes = []
        if num_workers == 1:
            notes.append("Links were not measured, one worker was alone: 0.2 ms and 1 GB/s are assumed.")
        elif across is None:
            notes.append("Links between machines were not measured: taken to be as inside the one machine.")
        elif within is None:
            notes.append("Links inside a machine were not measured: taken to be as between machines.")
        return JoinedLinks(
            within=within or across or ASSUMED_LINK,
            across=across or within or ASSUMED_LINK,
            all_reduce=tuple(point for each in found for point in each.all_reduce),
            notes=tuple(notes),
        )
