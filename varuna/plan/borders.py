"""Stage borders by dynamic programming: time of each stage under the memory of its device.

A *row* is a stage's distance from the end of the pipeline, its own stage included: row 1 is the last stage.
How many micro-batches a stage has in flight depends on its row alone, so one table, filled from row 1 upwards,
has the best borders of pipelines of every depth.

What a table minimises. Let a micro-batch keep the device of stage s busy for ``b_s`` seconds, and take ``p_s``
to pass it (forward, backward, the messages after it). A step of n micro-batches takes at least ``n b_s`` and the
sum of ``p_i`` over the stages before s: there the first one must have passed, and the last one must still.
The most of this over all stages is a lower bound under every schedule (``tail_weight=0``). With
``tail_weight=1`` the stages after s count too: ``(n - 1) max b + sum p``, which is what a step of equal stages
really takes. Borders come from that one, bounds from the other. ``b_s`` is the most of

- forward, backward, recompute if it recomputes, the engine's time per task, what sends take from the device;
- the transmission of one message to the next stage or back, since a channel carries one at a time;
- the way to the last stage and back, over the micro-batches that may be in flight at one time.

Each stage keeps its activations if they fit; else it has fewer in flight, or recomputes, whichever is faster.
A reduction counts where it outlasts what earlier stages still have to do.

All functions are pure; the inner loops are compiled by numba and cached on disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
from numba import njit

from varuna.plan.profile import LinkProfile
from varuna.plan.schedule import stage_schedule
from varuna.plan.tables import Floats, RunTable

_SPEED, _MEMORY, _LATENCY, _BYTE_S, _SEND, _LIMIT, _LEAST, _HELD, _HELD_AGAIN, _KEEP, _DROP, _TRIP = range(12)
"""Columns of ``_rows``."""

ANY, ANY_SPLIT = "any", "any, split"
"""In place of a schedule: what no schedule is better than, without and with split backwards. For bounds."""

OPPORTUNISTIC = ("varuna", "zero-bubble")
"""Schedules that keep any in-flight limit."""

SPLIT = ("zero-bubble", ANY_SPLIT)
"""Schedules with backward in two parts."""

MANY = 1 << 20
"""Micro-batches that make the time to fill a pipeline vanish."""

_TOLERANCE = 1e-9
"""Values this close, relatively, are equal: the better balanced borders win."""


@dataclass(frozen=True, kw_only=True)
class Row:
    """The device that holds the stage of one row, and the link from it to the next stage.

    Attributes:
        memory_bytes: of the device.
        speed: as a multiple of the profile's device.
        link: to the stage of the row below; not used in row 1.
        recompute: True or False if fixed; None leaves it to the table.
    """

    memory_bytes: float
    speed: float = 1.0
    link: LinkProfile
    recompute: bool | None = None


@dataclass(frozen=True, kw_only=True)
class BorderProblem:
    """What borders are asked for.

    Attributes:
        runs: costs at this micro-batch size.
        resident_bytes: ``[S + 1, S + 1]`` of sections ``[a, b)``.
        late_s: ``[S + 1, S + 1]``: for how long after their last task their gradients are being reduced.
        num_micro_batches: n of this pipeline.
        schedule: its name.
        rows: from row 1 (the last stage) upwards; as many as the deepest pipeline asked for has stages.
        task_overhead_s: the engine's time per task.
        frugal: where the schedule can, a stage may have fewer micro-batches in flight than stages from it to the
            end, which is what keeps those at work.
    """

    runs: RunTable
    resident_bytes: Floats
    late_s: Floats
    num_micro_batches: int
    schedule: str
    rows: Sequence[Row]
    task_overhead_s: float = 0.0
    frugal: bool = False


@dataclass(frozen=True, kw_only=True)
class Borders:
    """Stages of one pipeline, first to last.

    Attributes:
        borders: stage s holds sections ``borders[s] <= i < borders[s + 1]``.
        recompute: per stage.
        max_in_flight: per stage; 0 where the schedule's own limit fits.
        busy_s: per stage, what a micro-batch costs it.
        value_s: what the table minimised.
    """

    borders: tuple[int, ...]
    recompute: tuple[bool, ...]
    max_in_flight: tuple[int, ...]
    busy_s: tuple[float, ...]
    value_s: float


class BorderTable:
    """The best borders of pipelines of every depth up to ``len(problem.rows)``.

    For ``zero-bubble``, whose limit of held activations grows with the depth, memory is that of the deepest.
    """

    def __init__(self, problem: BorderProblem, *, tail_weight: float = 1.0, one_depth: bool = False) -> None:
        """``one_depth``: only the deepest pipeline is asked for, which is faster."""
        self.problem = problem
        self._arguments = _arguments(problem, tail_weight)
        arguments = (*self._arguments, one_depth)
        self._value, self._end = _fill(*arguments)

    def value_s(self, num_stages: int) -> float:
        """What the best borders come to; infinite if none fit."""
        return float(self._value[num_stages, 0])

    def values_s(self) -> Floats:
        """``value_s`` of every depth; the first entry means nothing."""
        return np.asarray(self._value[:, 0])

    def borders(self, num_stages: int) -> Borders | None:
        """The best borders of ``num_stages`` stages; None if none fit."""
        if not np.isfinite(self._value[num_stages, 0]):
            return None
        borders, recompute, limits, busy_s = [0], [], [], []
        for row in range(num_stages, 0, -1):
            first = borders[-1]
            end = int(self._end[row, first])
            busy, drops, limit = self.stage(row, first, end)
            borders.append(end)
            recompute.append(drops)
            limits.append(limit)
            busy_s.append(busy)
        return Borders(
            borders=tuple(borders),
            recompute=tuple(recompute),
            max_in_flight=self._tapered(limits),
            busy_s=tuple(busy_s),
            value_s=self.value_s(num_stages),
        )

    def stage(self, row: int, first_section: int, end_section: int) -> tuple[float, bool, int]:
        """Seconds a micro-batch keeps this stage busy (infinite: it does not fit), recompute, in-flight limit.

        The limit is 0 where it is the schedule's own.
        """
        sums, cuts, workspace, resident, _, rows, _, split, overhead_s, _ = self._arguments
        work = float(np.max(workspace[first_section:end_section]))
        busy_s, drops, limit = _stage(
            sums, cuts, work, resident, rows, split, overhead_s, first_section, end_section, row
        )
        return float(busy_s), bool(drops), int(limit)

    def _tapered(self, limits: Sequence[int]) -> tuple[int, ...]:
        """In-flight limits such that one that memory lowers lowers those after it too.

        Otherwise later stages fill up with micro-batches whose places the limited one waits for.
        """
        if self.problem.schedule not in OPPORTUNISTIC:
            return tuple(limits)
        tapered: list[int] = []
        before = MANY
        for row, limit in zip(range(len(limits), 0, -1), limits, strict=True):
            own = int(self._arguments[5][row, _LIMIT])
            before = min(limit or own, max(row, before - 1))
            tapered.append(0 if before >= own else before)
        return tuple(tapered)

    def least_bytes(self, row: int, first_section: int, end_section: int) -> float:
        """What this stage needs with as few micro-batches in flight as may be, recomputing if that is less."""
        sums, cuts, workspace, resident, _, rows, _, split, _, _ = self._arguments
        a, b, limits = first_section, end_section, rows[row]
        activations, later = sums[4, b] - sums[4, a], sums[5, b] - sums[5, a]
        needs = []
        if limits[_KEEP]:
            needs.append(limits[_LEAST] * max(cuts[0, a] + activations, later if split else 0.0))
        if limits[_DROP]:
            needs.append(limits[_LEAST] * max(cuts[0, a], later if split else 0.0) + activations)
        fixed = resident[a, b] + float(np.max(workspace[a:b])) + cuts[0, a] + cuts[1, a] + cuts[1, b]
        return float(fixed + min(needs))


@lru_cache(maxsize=4096)
def _limits(schedule: str, num_stages: int) -> tuple[tuple[int, int, int, int], ...]:
    """Per row: most in flight by default, least that keeps all at work, sets held without and with recompute."""
    if schedule == ANY:
        return ((MANY, 1, 0, 0),) * num_stages
    if schedule == ANY_SPLIT:
        return tuple(_limits("zero-bubble", row)[-1] for row in range(1, num_stages + 1))
    limits = []
    for stage_index in range(num_stages - 1, -1, -1):
        keeps, drops = (
            stage_schedule(
                schedule,
                num_stages=num_stages,
                stage_index=stage_index,
                num_micro_batches=MANY,
                recompute=(recompute,) * num_stages,
            )
            for recompute in (False, True)
        )
        least = min(keeps.max_in_flight, num_stages - stage_index)
        least = least if keeps.opportunistic else keeps.max_in_flight
        limits.append((keeps.max_in_flight, least, keeps.max_held, drops.max_held))
    return tuple(limits)


def _arguments(problem: BorderProblem, tail_weight: float) -> tuple[Any, ...]:
    runs = problem.runs
    names = ("forward_s", "recompute_s", "backward_s", "weight_s", "activation_bytes", "weight_bytes")
    return (
        np.stack([getattr(runs, name) for name in names]),
        np.stack([runs.forward_bytes, runs.backward_bytes]),
        runs.workspace_bytes,
        problem.resident_bytes,
        problem.late_s,
        _rows(problem, tail_weight),
        problem.num_micro_batches,
        problem.schedule in SPLIT,
        problem.task_overhead_s,
        tail_weight,
    )


def _rows(problem: BorderProblem, tail_weight: float) -> Floats:
    """``[len(rows) + 2, columns]``: row 0 is not used, the last one is the link into the deepest stage.

    A bound takes the least delay of a message, an estimate the mean.
    """
    num_rows, num = len(problem.rows), problem.num_micro_batches
    table = np.zeros((num_rows + 2, 12))
    trip_s = 0.0
    for index, row in enumerate(problem.rows, start=1):
        link = row.link
        latency_s = link.latency_s
        if link.jitter_s:
            latency_s += float(np.mean(link.jitter_s)) if tail_weight else min(link.jitter_s)
        if index > 1:
            trip_s += 2 * latency_s
        table[index, _SPEED : _SEND + 1] = (
            row.speed,
            row.memory_bytes,
            latency_s,
            1 / link.bytes_per_s,
            link.send_s,
        )
        table[index, _LIMIT : _HELD_AGAIN + 1] = np.minimum(num, _limits(problem.schedule, num_rows)[index - 1])
        if problem.schedule in (ANY, ANY_SPLIT) or (problem.frugal and problem.schedule in OPPORTUNISTIC):
            table[index, _LEAST] = 1
        never_drops = index == 1 and problem.schedule != "gpipe"  # its backwards follow their forwards at once
        table[index, _KEEP] = row.recompute is not True or never_drops
        table[index, _DROP] = row.recompute is not False and not never_drops
        table[index, _TRIP] = trip_s
    table[-1] = table[-2]
    return table


@njit(cache=True, forceinline=True)
def _fit(  # noqa: PLR0917
    free: float, first: float, later: float, limit: float, held: float, least: float
) -> float:
    """How many micro-batches may be in flight, at most ``limit``; 0 if fewer than ``least`` fit.

    Args:
        free: bytes.
        first: what each takes in flight.
        later: what each takes after that, until its weight gradients are done (``held`` > 0).
        limit: the default in flight; a lower one bounds ``held`` too.
        held: the default of sets in memory where backward is split, else 0.
        least: see above.
    """
    flying = min(limit, held) if held > 0 else limit
    most = flying * first
    if held > 0:
        most = max(most + (held - flying) * later, held * later)
    if most <= free:
        return limit
    each = max(first, later) if held > 0 else first
    if free < 0 or each <= 0:
        return 0.0
    fit = min(np.floor(free / each), limit - 1)
    return fit if fit >= least else 0.0


@njit(cache=True, forceinline=True)
def _stage(  # noqa: PLR0917
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
    """Busy seconds per micro-batch of sections ``[a, b)`` in a row, recompute or not, its in-flight limit."""
    last = sums.shape[1] - 1
    speed = rows[row, _SPEED]
    work_s = (sums[0, b] - sums[0, a] + sums[2, b] - sums[2, a]) / speed + overhead_s * (3 if split else 2)
    work_s += (rows[row, _SEND] if row > 1 else 0.0) + (rows[row + 1, _SEND] if a > 0 else 0.0)
    wire_s = max(cuts[0, b], cuts[1, b]) * rows[row, _BYTE_S] if row > 1 else 0.0
    trip_s = sums[0, last] - sums[0, a] + sums[2, last] - sums[2, a]
    if split:
        trip_s -= sums[3, last] - sums[3, a]
    trip_s = trip_s / speed + 2 * row * overhead_s + rows[row, _TRIP]
    free = rows[row, _MEMORY] - resident[a, b] - workspace - cuts[0, a] - cuts[1, a] - cuts[1, b]
    activations = sums[4, b] - sums[4, a]
    later = sums[5, b] - sums[5, a]
    limit, least = rows[row, _LIMIT], rows[row, _LEAST]
    best_s, best_drops, best_fit = np.inf, False, 0.0
    if rows[row, _KEEP]:
        fit = _fit(free, cuts[0, a] + activations, later, limit, rows[row, _HELD], least)
        if fit > 0:
            best_s, best_fit = max(work_s, wire_s, trip_s / fit), fit
    if rows[row, _DROP]:
        again_s = (sums[1, b] - sums[1, a]) / speed + overhead_s
        held = rows[row, _HELD_AGAIN]
        fit = _fit(free - activations, cuts[0, a], later, limit, held, least)
        if fit > 0 and max(work_s + again_s, wire_s, trip_s / fit) < best_s:
            best_s, best_drops, best_fit = max(work_s + again_s, wire_s, trip_s / fit), True, fit
    return best_s, best_drops, 0 if best_fit == limit else int(best_fit)


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
    speed = rows[row, _SPEED]
    busy_s, _, _ = _stage(sums, cuts, work_bytes[a, b], resident, rows, split, overhead_s, a, b, row)
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
        found += tail_weight * (tail_s / speed + rows[row, _TRIP])
    found += max(0.0, late_s[a, b] - drain_s / speed)
    if row > 1:
        message_s = 2 * rows[row, _LATENCY] + (cuts[0, b] + cuts[1, b]) * rows[row, _BYTE_S]
        if split and tail_weight == 0.0:  # weight tasks may fill the way back
            passed_s, message_s = forward_s, message_s / 2
        found = max(found, passed_s / speed + 2 * overhead_s + message_s + below[b])
    return found


@njit(cache=True)
def _fill(  # noqa: PLR0917
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
            while fits > a and resident[a, fits] + sums[4, fits] - sums[4, a] > rows[row, _MEMORY]:
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
                    if step == 1 and num * compute_s / rows[row, _SPEED] > enough:
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
