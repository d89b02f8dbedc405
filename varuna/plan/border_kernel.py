"""The inner loops of ``borders``, compiled by numba and cached on disk.

Shapes: ``sums`` is ``[6, S + 1]``: before each section, the sums of forward, recompute, backward and weight
seconds, of activation and held bytes; ``cuts`` ``[2, S + 1]``: bytes forward and backward at each cut;
``workspace`` ``[S]``; ``resident``, ``late_s`` ``[S + 1, S + 1]`` of sections ``[a, b)``; ``rows`` ``[depth +
2, 12]``.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numba import njit

SPEED, MEMORY, LATENCY, BYTE_S, SEND, LIMIT, LEAST, HELD, HELD_AGAIN, KEEP, DROP, TRIP = range(12)
"""Columns of ``rows``; row 0 means nothing, the last one is the link into the deepest stage."""

_TOLERANCE = 1e-9
"""Values this close, relatively, are equal: the better balanced borders win."""


@njit(cache=True, forceinline=True)
def _fit(  # noqa: PLR0917
    free: float, first: float, later: float, limit: float, held: float, least: float
) -> tuple[float, float]:
    """How many micro-batches may be in flight (0: fewer than ``least`` fit), and the limit to state for that.

    Args:
        free: bytes.
        first: what each takes in flight.
        later: what each takes after that, until its weight gradients are done (``held`` > 0).
        limit: the default in flight; a limit that is stated bounds ``held`` too.
        held: the default of sets in memory where backward is split, else 0.
        least: see above.
    """
    if held == 0:
        if limit * first <= free:
            return limit, 0.0
        fit = min(np.floor(free / first), limit - 1) if first > 0 else 0.0
    else:
        flying = min(limit, held)
        if max(flying * first + (held - flying) * later, held * later) <= free:
            return limit, 0.0
        each = max(first, later)
        if limit == 1 and later > 0:  # the last stage: one in flight
            fit = min(np.floor((free - first) / later) + 1, np.floor(free / later))
        else:
            fit = np.floor(free / each) if each > 0 else 0.0
        fit = min(fit, held - 1)
    return (fit, fit) if fit >= least else (0.0, 0.0)


@njit(cache=True, forceinline=True)
def _fit_again(  # noqa: PLR0917
    free: float, first: float, later: float, again: float, limit: float, held: float, least: float
) -> tuple[float, float]:
    """As ``_fit`` where activations are dropped: ``first`` is the input, ``again`` one recomputed set."""
    if held > 0:
        again = max(again, later)
        if limit * first + (held - 1) * later + again <= free:
            return limit, 0.0
        fit = np.floor((free - again - (held - 1) * later) / first) if first > 0 else 0.0
        if fit < held:  # a lower limit bounds held sets too
            fit = np.floor((free - again + later) / (first + later)) if first + later > 0 else 0.0
            fit = min(fit, held)
    else:
        if limit * first + again <= free:
            return limit, 0.0
        fit = np.floor((free - again) / first) if first > 0 else 0.0
    fit = min(fit, limit - 1)
    return (fit, fit) if fit >= max(1.0, least) else (0.0, 0.0)


@njit(cache=True, forceinline=True)
def stage_of(  # noqa: PLR0917
    sums: Any,
    cuts: Any,
    workspace: float,
    resident: Any,
    rows: Any,
    split: bool,
    overhead_s: float,
    a: int,
    b: int,
    row: int,
) -> tuple[float, bool, int]:
    """Busy seconds per micro-batch of sections ``[a, b)`` in a row, recompute or not, limit or 0."""
    last = sums.shape[1] - 1
    speed = rows[row, SPEED]
    work_s = (sums[0, b] - sums[0, a] + sums[2, b] - sums[2, a]) / speed + overhead_s * (3 if split else 2)
    work_s += (rows[row, SEND] if row > 1 else 0.0) + (rows[row + 1, SEND] if a > 0 else 0.0)
    wire_s = max(cuts[0, b], cuts[1, b]) * rows[row, BYTE_S] if row > 1 else 0.0
    trip_s = sums[0, last] - sums[0, a] + sums[2, last] - sums[2, a]
    if split:
        trip_s -= sums[3, last] - sums[3, a]
    trip_s = trip_s / speed + 2 * row * overhead_s + rows[row, TRIP]
    free = rows[row, MEMORY] - resident[a, b] - workspace - cuts[0, a] - cuts[1, a] - cuts[1, b]
    activations = sums[4, b] - sums[4, a]
    later = sums[5, b] - sums[5, a]
    limit, least = rows[row, LIMIT], rows[row, LEAST]
    best_s, best_drops, best_limit = np.inf, False, 0.0
    if rows[row, KEEP]:
        fit, stated = _fit(free, cuts[0, a] + activations, later, limit, rows[row, HELD], least)
        if fit > 0:
            best_s, best_limit = max(work_s, wire_s, trip_s / fit), stated
    if rows[row, DROP]:
        again_s = (sums[1, b] - sums[1, a]) / speed + overhead_s
        held = rows[row, HELD_AGAIN]
        fit, stated = _fit_again(free, cuts[0, a], later, activations, limit, held, least)
        if fit > 0 and max(work_s + again_s, wire_s, trip_s / fit) < best_s:
            best_s, best_drops, best_limit = max(work_s + again_s, wire_s, trip_s / fit), True, stated
    return best_s, best_drops, int(best_limit)


@njit(cache=True, forceinline=True)
def _value(  # noqa: PLR0917
    sums: Any,
    cuts: Any,
    work_bytes: Any,
    resident: Any,
    late_s: Any,
    rows: Any,
    num: int,
    split: bool,
    overhead_s: float,
    tail_weight: float,
    below: Any,
    a: int,
    b: int,
    row: int,
) -> float:
    """What a table minimises, where the stage of ``row`` holds sections ``[a, b)``."""
    count = sums.shape[1] - 1
    speed = rows[row, SPEED]
    busy_s, _, _ = stage_of(sums, cuts, work_bytes[a, b], resident, rows, split, overhead_s, a, b, row)
    tail_s = sums[0, count] - sums[0, b] + sums[2, count] - sums[2, b]
    forward_s = sums[0, b] - sums[0, a]
    compute_s = forward_s + sums[2, b] - sums[2, a]
    passed_s = compute_s
    drain_s = sums[2, a]
    if split:
        tail_s -= sums[3, count] - sums[3, b]
        drain_s -= sums[3, a]
        passed_s -= sums[3, b] - sums[3, a]
    found: float = num * busy_s
    if row > 1:
        found += tail_weight * (tail_s / speed + rows[row, TRIP])
    found += max(0.0, late_s[a, b] - drain_s / speed)
    if row > 1:
        message_s = 2 * rows[row, LATENCY] + (cuts[0, b] + cuts[1, b]) * rows[row, BYTE_S]
        if split and tail_weight == 0.0:  # weight tasks may fill the way back
            passed_s, message_s = forward_s, message_s / 2
        found = max(found, passed_s / speed + 2 * overhead_s + message_s + below[b])
    return found


@njit(cache=True)
def fill(  # noqa: PLR0917
    sums: Any,
    cuts: Any,
    workspace: Any,
    resident: Any,
    late_s: Any,
    rows: Any,
    num: int,
    split: bool,
    overhead_s: float,
    tail_weight: float,
    one_depth: bool,
) -> tuple[Any, Any]:
    """``value[row, a]``: least value of sections ``[a, S)`` in ``row`` stages; ``end[row, a]``: its border.

    From a border near the best one, both ways, until no further one can be better: a longer stage takes longer
    by its compute alone, or fits no device; of shorter ones, the rest takes longer than the best.
    """
    count = sums.shape[1] - 1
    num_rows = rows.shape[0] - 2
    work_bytes = np.zeros((count + 1, count + 1))
    for a in range(count):
        for b in range(a + 1, count + 1):
            work_bytes[a, b] = max(work_bytes[a, b - 1], workspace[b - 1])
    value = np.full((num_rows + 1, count + 1), np.inf)
    end = np.zeros((num_rows + 1, count + 1), np.int64)
    least = np.empty(count + 1)
    for row in range(1, num_rows + 1):
        below = value[row - 1]
        least[0] = below[0]  # least[b]: the least of below[: b + 1]
        for b in range(1, count + 1):
            least[b] = min(least[b - 1], below[b])
        first = num_rows - row if one_depth else 0
        fits = near = count - row + 1
        for a in range(count - row, first - 1, -1):
            best, best_far = np.inf, np.inf
            mean_s = (sums[0, count] - sums[0, a] + sums[2, count] - sums[2, a]) / row
            while fits > a and resident[a, fits] + sums[4, fits] - sums[4, a] > rows[row, MEMORY]:
                fits -= 1
            low, high = (count, fits) if row == 1 else (a + 1, fits)
            while low < high and below[low] == np.inf and row > 1:
                low += 1
            near = min(max(near, low), high)
            for step in (1, -1):
                b = near if step == 1 else near - 1
                while low <= b <= high:
                    compute_s = sums[0, b] - sums[0, a] + sums[2, b] - sums[2, a]
                    enough = best * (1 + _TOLERANCE)
                    if step == 1 and num * compute_s / rows[row, SPEED] > enough:
                        break
                    if step == -1 and (least[b] > enough or least[b] == np.inf):
                        break
                    found = _value(
                        sums,
                        cuts,
                        work_bytes,
                        resident,
                        late_s,
                        rows,
                        num,
                        split,
                        overhead_s,
                        tail_weight,
                        below,
                        a,
                        b,
                        row,
                    )
                    far = abs(compute_s - mean_s)
                    if found < best * (1 - _TOLERANCE) or (found <= enough and far < best_far):
                        best, best_far, end[row, a] = found, far, b
                    b += step
            value[row, a] = best
            if best < np.inf:
                near = end[row, a]
    return value, end


@njit(cache=True)
def walk(  # noqa: PLR0917
    sums: Any,
    cuts: Any,
    workspace: Any,
    resident: Any,
    rows: Any,
    split: bool,
    overhead_s: float,
    end: Any,
    num_stages: int,
) -> tuple[Any, Any, Any, Any]:
    """Borders from first to last stage, and per stage busy seconds, recompute, in-flight limit."""
    borders = np.zeros(num_stages + 1, np.int64)
    busy_s = np.zeros(num_stages)
    drops = np.zeros(num_stages, np.bool_)
    limits = np.zeros(num_stages, np.int64)
    for stage in range(num_stages):
        row = num_stages - stage
        a = borders[stage]
        b = end[row, a]
        borders[stage + 1] = b
        work = workspace[a:b].max()
        busy_s[stage], drops[stage], limits[stage] = stage_of(
            sums, cuts, work, resident, rows, split, overhead_s, a, b, row
        )
    return borders, busy_s, drops, limits
