"""Cut a row of sections into stages so that the slowest stage is as fast as it can be."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import inf


def balance(
    costs: Sequence[float], num_stages: int, *, sizes: Sequence[float] | None = None, size_limit: float = inf
) -> tuple[int, ...] | None:
    """Borders ``b`` of ``num_stages`` runs ``[b[i], b[i + 1])``, none empty, of least maximal cost.

    Among equals, later stages are the fuller ones: earlier stages hold more micro-batches in flight.

    Args:
        costs: per section, in order; any one unit.
        num_stages: from 1 to the number of sections.
        sizes: per section; no run may sum to more than ``size_limit``.
        size_limit: see ``sizes``.

    Returns:
        ``num_stages + 1`` borders from 0 to the number of sections, or None if ``size_limit`` cannot be kept.
    """
    num_sections = len(costs)
    assert 1 <= num_stages <= num_sections, f"{num_stages} stages of {num_sections} sections"
    cost_before = [0.0, *accumulate(costs)]
    size_before = [0.0, *accumulate(sizes or [0.0] * num_sections)]
    best = [0.0, *[inf] * num_sections]  # best[end]: least maximal cost of sections [0, end) in the runs so far
    starts: list[list[int]] = []  # per run, the start that gave best[end]
    for run_index in range(num_stages):
        extended = [inf] * (num_sections + 1)
        start_of = [0] * (num_sections + 1)
        for end in range(run_index + 1, num_sections + 1):
            for start in range(run_index, end):
                if size_before[end] - size_before[start] > size_limit:
                    continue
                cost = max(best[start], cost_before[end] - cost_before[start])
                if cost < extended[end]:
                    extended[end], start_of[end] = cost, start
        best = extended
        starts.append(start_of)
    if best[num_sections] == inf:
        return None
    borders = [num_sections]
    for start_of in reversed(starts):
        borders.append(start_of[borders[-1]])
    return tuple(reversed(borders))
