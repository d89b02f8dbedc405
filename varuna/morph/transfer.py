"""Who takes which place of a plan, and which sections travel from whom to whom. Pure.

Places are given to workers such that the fewest bytes move (an assignment problem, solved exactly). Bytes are
those of parameters; optimizer state is a multiple of them. Each missing section then comes from a holder on the
same machine if there is one, else from the one with the least to send.

Transfers are carried out one by one in the order of the list by everybody who takes part in them, so no circle
of waiting workers can arise: of all transfers that are not done, the first can always run. They are listed in
rounds in which no worker occurs twice: those of one round run at the same time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
from scipy.optimize import linear_sum_assignment  # type: ignore[import-untyped]

from varuna.generations import SectionTransfer
from varuna.spec import Plan, SectionSpec, StageSpec

_COUNT_WEIGHT = 1 / 1024
"""What one section more costs, in bytes: where as many bytes move, the fewest sections are to move."""


def place(
    plan: Plan,
    ranks: Sequence[int],
    size: int,
    held: Mapping[int, frozenset[int]],
    sections: Sequence[SectionSpec],
) -> Plan:
    """The plan with its workers replaced by ranks, such that the fewest bytes move.

    Args:
        plan: for ``len(ranks)`` workers.
        ranks: workers that can take a place, in ascending order.
        size: workers of the generation: ``ranks`` and those that get no place.
        held: sections that each rank has, up to date; a rank may be missing.
        sections: of the model.
    """
    assert plan.num_workers == len(ranks), (plan.num_workers, ranks)
    stages = [stage for pipeline in plan.pipelines for stage in pipeline.stages]
    cost = np.array([[_missing_cost(stage, held.get(rank), sections) for rank in ranks] for stage in stages])
    rows, columns = linear_sum_assignment(cost)
    rank_of = {stages[row].worker_index: ranks[column] for row, column in zip(rows, columns, strict=True)}
    pipelines = tuple(
        replace(
            pipeline,
            stages=tuple(replace(stage, worker_index=rank_of[stage.worker_index]) for stage in pipeline.stages),
        )
        for pipeline in plan.pipelines
    )
    return replace(plan, pipelines=pipelines, num_workers=size)


def _missing_cost(stage: StageSpec, held: frozenset[int] | None, sections: Sequence[SectionSpec]) -> float:
    missing = set(range(stage.first_section, stage.end_section)) - (held or frozenset())
    return sum(sections[index].parameter_bytes + _COUNT_WEIGHT for index in missing)


def transfers_of(
    plan: Plan, held: Mapping[int, frozenset[int]], machines: Sequence[str], sections: Sequence[SectionSpec]
) -> tuple[SectionTransfer, ...]:
    """What has to travel before ``plan`` can begin; who holds a section gets nothing.

    Args:
        plan: by ranks, from ``place``.
        held: sections that each rank has, up to date; each section of the plan has a holder.
        machines: of each rank.
        sections: of the model.
    """
    holders: dict[int, list[int]] = {}
    for rank in sorted(held):
        for section in held[rank]:
            holders.setdefault(section, []).append(rank)
    wanted = [
        (section, stage.worker_index)
        for pipeline in plan.pipelines
        for stage in pipeline.stages
        for section in range(stage.first_section, stage.end_section)
        if section not in held.get(stage.worker_index, frozenset())
    ]
    wanted.sort(key=lambda pair: (-sections[pair[0]].parameter_bytes, pair))
    sent_bytes: Counter[int] = Counter()
    transfers = []
    for section, destination in wanted:
        source = min(
            holders[section],
            key=lambda rank: (machines[rank] != machines[destination], sent_bytes[rank], rank),
        )
        sent_bytes[source] += sections[section].parameter_bytes
        transfers.append(SectionTransfer(section_index=section, source=source, destination=destination))
    return _in_rounds(transfers)


def _in_rounds(transfers: Sequence[SectionTransfer]) -> tuple[SectionTransfer, ...]:
    """The same transfers, ordered so that neighbours in the list can run at the same time."""
    ordered: list[SectionTransfer] = []
    left = list(transfers)
    while left:
        busy: set[int] = set()
        later = []
        for transfer in left:
            if {transfer.source, transfer.destination} & busy:
                later.append(transfer)
            else:
                ordered.append(transfer)
            busy |= {transfer.source, transfer.destination}
        left = later
    return tuple(ordered)
