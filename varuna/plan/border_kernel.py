"""The inner loops of ``borders``, compiled by numba and cached on disk.

Shapes: ``sums`` is ``[6, S + 1]``: before each section, the sums of forward, recompute, backward and weight
seconds, of activation and held bytes; ``cuts`` ``[2, S + 1]``: bytes forward and backward at each cut;
``workspace`` ``[S]``; ``resident``, ``late_s`` ``[S + 1, S + 1]`` of sections ``[a, b)``; ``rows`` ``[depth +
2, 12]``.

What the innermost loop reads is in tuples (``Row``, ``End``), which stay in registers: arrays would be read
again each time, for all the compiler knows of what else is written.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import njit

SPEED, MEMORY, LATENCY, BYTE_S, SEND, LIMIT, LEAST, HELD, HELD_AGAIN, KEEP, DROP, TRIP = range(12)
"""Columns of ``rows``; row 0 means nothing, the last one is the link into the deepest stage."""

_TOLERANCE = 1e-9
"""Values this close, relatively, are equal: the better balanced borders win."""


class Row(NamedTuple):
    """One row of ``rows``, its number, and what a send to the row above takes."""

    number: int
    speed: float
    memory_bytes: float
    latency_s: float
    byte_s: float
    send_s: float
    limit: float
    least: float
    held: float
    held_again: float
    keep: float
    drop: float
    trip_s: float
    send_above_s: float


class End(NamedTuple):
    """One column of ``sums`` and ``cuts``: what lies before a section, and what crosses there."""

    forward_s: float
    recompute_s: float
    backward_s: float
    weight_s: float
    activation_bytes: float
    held_bytes: float
    forward_bytes: float
    backward_bytes: float


@njit(cache=True, error_model="numpy", forceinline=True)
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


@njit(cache=True, error_model="numpy", forceinline=True)
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


@njit(cache=True, error_model="numpy", forceinline=True)
def _row_of(rows: Any, row: int) -> Row:
    return Row(
        number=row,
        speed=rows[row, SPEED],
        memory_bytes=rows[row, MEMORY],
        latency_s=rows[row, LATENCY],
        byte_s=rows[row, BYTE_S],
        send_s=rows[row, SEND],
        limit=rows[row, LIMIT],
        least=rows[row, LEAST],
        held=rows[row, HELD],
        held_again=rows[row, HELD_AGAIN],
        keep=rows[row, KEEP],
        drop=rows[row, DROP],
        trip_s=rows[row, TRIP],
        send_above_s=rows[row + 1, SEND],
    )


@njit(cache=True, error_model="numpy", forceinline=True)
def _end_of(sums: Any, cuts: Any, index: int) -> End:
    return End(
        forward_s=sums[0, index],
        recompute_s=sums[1, index],
        backward_s=sums[2, index],
        weight_s=sums[3, index],
        activation_bytes=sums[4, index],
        held_bytes=sums[5, index],
        forward_bytes=cuts[0, index],
        backward_bytes=cuts[1, index],
    )


@njit(cache=True, error_model="numpy", forceinline=True)
def _between(first: End, end: End, split: bool) -> tuple[float, float]:
    """Seconds of forward and backward of sections, and without the weights' part where backward is split."""
    compute_s = end.forward_s - first.forward_s + end.backward_s - first.backward_s
    return compute_s, compute_s - (end.weight_s - first.weight_s) if split else compute_s


@njit(cache=True, error_model="numpy", forceinline=True)
def _stage(  # noqa: PLR0917
    row: Row,
    first: End,
    end: End,
    rest_s: float,
    workspace: float,
    resident: float,
    split: bool,
    overhead_s: float,
    is_first: bool,
) -> tuple[float, bool, int]:
    """See ``stage_of``; ``rest_s``: a micro-batch's way through these and all later sections and back."""
    compute_s, _ = _between(first, end, split)
    work_s = compute_s / row.speed + overhead_s * (3 if split else 2)
    work_s += (row.send_s if row.number > 1 else 0.0) + (0.0 if is_first else row.send_above_s)
    wire_s = max(end.forward_bytes, end.backward_bytes) * row.byte_s if row.number > 1 else 0.0
    trip_s = rest_s / row.speed + 2 * row.number * overhead_s + row.trip_s
    free = row.memory_bytes - resident - workspace
    free -= first.forward_bytes + first.backward_bytes + end.backward_bytes
    activations = end.activation_bytes - first.activation_bytes
    later = end.held_bytes - first.held_bytes
    best_s, best_drops, best_limit = np.inf, False, 0.0
    if row.keep:
        fit, stated = _fit(free, first.forward_bytes + activations, later, row.limit, row.held, row.least)
        if fit > 0:
            best_s, best_limit = max(work_s, wire_s, trip_s / fit), stated
    if row.drop:
        work_s += (end.recompute_s - first.recompute_s) / row.speed + overhead_s
        if max(work_s, wire_s) < best_s:
            fit, stated = _fit_again(
                free, first.forward_bytes, later, activations, row.limit, row.held_again, row.least
            )
            if fit > 0 and max(work_s, wire_s, trip_s / fit) < best_s:
                best_s, best_drops, best_limit = max(work_s, wire_s, trip_s / fit), True, stated
    return best_s, best_drops, int(best_limit)


@njit(cache=True, error_model="numpy")
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
    first, end, last = _end_of(sums, cuts, a), _end_of(sums, cuts, b), _end_of(sums, cuts, sums.shape[1] - 1)
    _, rest_s = _between(first, last, split)
    return _stage(_row_of(rows, row), first, end, rest_s, workspace, resident[a, b], split, overhead_s, a == 0)


@njit(cache=True, error_model="numpy", forceinline=True)
def _value(  # noqa: PLR0917
    row: Row,
    first: End,
    end: End,
    last: End,
    num: int,
    busy_s: float,
    late_s: float,
    below_s: float,
    split: bool,
    overhead_s: float,
    tail_weight: float,
) -> float:
    """What a table minimises, where the stage of a row holds the sections between two ends."""
    _, passed_s = _between(first, end, split)
    _, tail_s = _between(end, last, split)
    drain_s = first.backward_s - first.weight_s if split else first.backward_s
    found: float = num * busy_s
    if row.number > 1:
        found += tail_weight * (tail_s / row.speed + row.trip_s)
    found += max(0.0, late_s - drain_s / row.speed)
    if row.number > 1:
        message_s = 2 * row.latency_s + (end.forward_bytes + end.backward_bytes) * row.byte_s
        if split and tail_weight == 0.0:  # weight tasks may fill the way back
            passed_s, message_s = end.forward_s - first.forward_s, message_s / 2
        found = max(found, passed_s / row.speed + 2 * overhead_s + message_s + below_s)
    return found


@njit(cache=True, error_model="numpy")
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
    border = np.zeros((num_rows + 1, count + 1), np.int64)
    least = np.empty(count + 1)
    last = _end_of(sums, cuts, count)
    for number in range(1, num_rows + 1):
        row = _row_of(rows, number)
        below = value[number - 1]
        least[0] = below[0]  # least[b]: the least of below[: b + 1]
        for b in range(1, count + 1):
            least[b] = min(least[b - 1], below[b])
        fits = near = count - number + 1
        for a in range(count - number, num_rows - number - 1 if one_depth else -1, -1):
            first = _end_of(sums, cuts, a)
            all_s, rest_s = _between(first, last, split)
            while fits > a and resident[a, fits] + sums[4, fits] - first.activation_bytes > row.memory_bytes:
                fits -= 1
            low, high = (count, fits) if number == 1 else (a + 1, fits)
            while low < high and below[low] == np.inf and number > 1:
                low += 1
            near = min(max(near, low), high)
            best, best_far, best_b = np.inf, np.inf, 0
            for step in (1, -1):
                b = near if step == 1 else near - 1
                while low <= b <= high:
                    end = _end_of(sums, cuts, b)
                    compute_s, _ = _between(first, end, split)
                    enough = best * (1 + _TOLERANCE)
                    if step == 1 and num * compute_s / row.speed > enough:
                        break
                    if step == -1 and (least[b] > enough or least[b] == np.inf):
                        break
                    busy_s, _, _ = _stage(
                        row, first, end, rest_s, work_bytes[a, b], resident[a, b], split, overhead_s, a == 0
                    )
                    found = _value(
                        row, first, end, last, num, busy_s, late_s[a, b], below[b],
                        split, overhead_s, tail_weight,
                    )  # fmt: skip
                    far = abs(compute_s - all_s / number)
                    if found < best * (1 - _TOLERANCE) or (found <= enough and far < best_far):
                        best, best_far, best_b = found, far, b
                    b += step
            value[number, a], border[number, a] = best, best_b
            if best < np.inf:
                near = best_b
    return value, border


@njit(cache=True, error_model="numpy")
def walk(  # noqa: PLR0917
    sums: Any,
    cuts: Any,
    workspace: Any,
    resident: Any,
    rows: Any,
    split: bool,
    overhead_s: float,
    border: Any,
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
        b = border[row, a]
        borders[stage + 1] = b
        work = workspace[a:b].max()
        busy_s[stage], drops[stage], limits[stage] = stage_of(
            sums, cuts, work, resident, rows, split, overhead_s, a, b, row
        )
    return borders, busy_s, drops, limits
