"""Stage borders by dynamic programming: time of each stage under the memory of its device.

A *row* is a stage's distance from the end of the pipeline, its own stage included: row 1 is the last stage.
How many micro-batches a stage has in flight depends on its row alone, so one table, filled from row 1 upwards,
has the best borders of pipelines of every depth.

What a table minimises. Let a micro-batch keep the device of stage s busy for ``b_s`` seconds, and take ``p_s``
to pass it (forward, backward, the messages after it). A step of n micro-batches takes at least ``n b_s`` plus
the ``p_i`` of the stages before s: the first one must have passed those, and the last one must still.
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
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import Any

import numpy as np
from numpy.typing import NDArray

from varuna.plan.border_kernel import (
    BYTE_S,
    DROP,
    HELD_AGAIN,
    KEEP,
    LATENCY,
    LEAST,
    LIMIT,
    MEMORY,
    SEND,
    SPEED,
    TRIP,
    fill,
    stage_of,
    walk,
)
from varuna.plan.profile import LinkProfile
from varuna.plan.schedule import default_max_held, default_max_in_flight
from varuna.plan.tables import Floats, RunTable

ANY, ANY_SPLIT = "any", "any, split"
"""In place of a schedule: what no schedule is better than, without and with split backwards. For bounds."""

OPPORTUNISTIC = ("varuna", "zero-bubble")
"""Schedules that keep any in-flight limit."""

SPLIT = ("zero-bubble", ANY_SPLIT)
"""Schedules with backward in two parts."""

MANY = 1 << 20
"""Micro-batches that make the time to fill a pipeline vanish."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Rows:
    """Where the stages of a pipeline are, from the last stage upwards: one entry for each row, row 1 first.

    Attributes:
        memory_bytes: of the device.
        speed: of the device, as a multiple of the profile's.
        crosses: whether the link to the stage of the row below goes to another machine; not used in row 1.
        recompute: per row, True or False if fixed; None leaves it to the table.
        within, across: links on a machine and between machines.
    """

    memory_bytes: Floats
    speed: Floats
    crosses: NDArray[np.bool_]
    recompute: Sequence[bool] | bool | None
    within: LinkProfile
    across: LinkProfile

    def __len__(self) -> int:
        return len(self.memory_bytes)

    @cached_property
    def mean_columns(self) -> Floats:
        """``[len + 2, columns]`` for estimates, which take the mean delay of a message; limits are left out."""
        return self._columns([sum(link.jitter_s) / max(1, len(link.jitter_s)) for link in self._links])

    @cached_property
    def least_columns(self) -> Floats:
        """The same for bounds, which take the least delay."""
        return self._columns([min(link.jitter_s, default=0.0) for link in self._links])

    @property
    def _links(self) -> tuple[LinkProfile, LinkProfile]:
        return self.within, self.across

    def _columns(self, delays_s: Sequence[float]) -> Floats:
        table = np.zeros((len(self) + 2, 12))
        inner = table[1:-1]
        inner[:, SPEED], inner[:, MEMORY] = self.speed, self.memory_bytes
        for column, (within, across) in (
            (LATENCY, [link.latency_s + delay for link, delay in zip(self._links, delays_s, strict=True)]),
            (BYTE_S, [1 / link.bytes_per_s for link in self._links]),
            (SEND, [link.send_s for link in self._links]),
        ):
            inner[:, column] = np.where(self.crosses, across, within)
        inner[:, KEEP : DROP + 1] = 1
        if self.recompute is not None:
            inner[:, DROP] = self.recompute
            inner[:, KEEP] -= inner[:, DROP]
        inner[1:, TRIP] = 2 * np.cumsum(inner[1:, LATENCY])
        return table


@dataclass(frozen=True, kw_only=True)
class BorderProblem:
    """What borders are asked for.

    Attributes:
        runs: costs at this micro-batch size.
        resident_bytes: ``[S + 1, S + 1]`` of sections ``[a, b)``.
        late_s: ``[S + 1, S + 1]``: for how long after their last task their gradients are being reduced.
        num_micro_batches: n of this pipeline.
        schedule: its name.
        rows: as many as the deepest pipeline asked for has stages.
        task_overhead_s: the engine's time per task.
        slowdown: how much longer messages between machines take, because others share the links.
        margin_bytes: left free on every device.
        frugal: where the schedule can, a stage may have fewer micro-batches in flight than stages from it on,
            which is what keeps those at work.
    """

    runs: RunTable
    resident_bytes: Floats
    late_s: Floats
    num_micro_batches: int
    schedule: str
    rows: Rows
    task_overhead_s: float = 0.0
    slowdown: float = 1.0
    margin_bytes: float = 0.0
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
        self._value, self._end = fill(*arguments)

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
        sums, cuts, workspace, resident, _, rows, _, split, overhead_s, _ = self._arguments
        found = walk(sums, cuts, workspace, resident, rows, split, overhead_s, self._end, num_stages)
        borders, busy_s, drops, limits = (values.tolist() for values in found)
        return Borders(
            borders=tuple(borders),
            recompute=tuple(drops),
            max_in_flight=self._tapered(limits),
            busy_s=tuple(busy_s),
            value_s=self.value_s(num_stages),
        )

    def at(self, borders: Sequence[int]) -> Borders | None:
        """Stages with given borders; None if one does not fit. ``value_s`` is that of the best borders."""
        depth = len(borders) - 1
        stages = [self.stage(depth - stage, *ends) for stage, ends in enumerate(pairwise(borders))]
        if any(busy_s == np.inf for busy_s, _, _ in stages):
            return None
        return Borders(
            borders=tuple(borders),
            recompute=tuple(drops for _, drops, _ in stages),
            max_in_flight=self._tapered([limit for _, _, limit in stages]),
            busy_s=tuple(busy_s for busy_s, _, _ in stages),
            value_s=self.value_s(depth),
        )

    def stage(self, row: int, first_section: int, end_section: int) -> tuple[float, bool, int]:
        """Seconds a micro-batch keeps this stage busy (infinite: it does not fit), recompute, in-flight limit.

        The limit is 0 where it is the schedule's own.
        """
        sums, cuts, workspace, resident, _, rows, _, split, overhead_s, _ = self._arguments
        work = float(np.max(workspace[first_section:end_section]))
        busy_s, drops, limit = stage_of(
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
            if limit == 0 and before == MANY:  # nothing is lowered so far: the schedule's own
                tapered.append(0)
                continue
            own = limit or int(self._arguments[5][row, LIMIT])
            most = max(row, before - 1)
            before = min(own, most)
            tapered.append(limit if own <= most else before)
        return tuple(tapered)

    def least_bytes(self, row: int, first_section: int, end_section: int) -> float:
        """What this stage needs with as few micro-batches in flight as may be, recomputing if that is less."""
        sums, cuts, workspace, resident, _, rows, _, split, _, _ = self._arguments
        a, b, limits = first_section, end_section, rows[row]
        activations, later = sums[4, b] - sums[4, a], sums[5, b] - sums[5, a]
        needs = []
        if limits[KEEP]:
            needs.append(limits[LEAST] * max(cuts[0, a] + activations, later if split else 0.0))
        if limits[DROP]:
            held = (limits[LEAST] - 1) * later + max(0.0, later - activations) if split else 0.0
            needs.append(limits[LEAST] * cuts[0, a] + activations + held)
        fixed = resident[a, b] + float(np.max(workspace[a:b])) + cuts[0, a] + cuts[1, a] + cuts[1, b]
        return float(fixed + min(needs))


@lru_cache(maxsize=4096)
def _limits(schedule: str, num_stages: int) -> Floats:
    """Per row: default in flight, least that keeps all at work, sets held without and with recompute."""
    if schedule == ANY:
        return np.full((num_stages, 4), (MANY, 1, 0, 0), dtype=np.float64)
    if schedule == ANY_SPLIT:  # the first stage of the shallowest pipeline that has this row
        rows = range(1, num_stages + 1)
        return np.array([_stage_limits(schedule, row, 0) for row in rows], dtype=np.float64)
    stages = range(num_stages - 1, -1, -1)
    return np.array([_stage_limits(schedule, num_stages, stage) for stage in stages], dtype=np.float64)


def _stage_limits(schedule: str, num_stages: int, stage_index: int) -> tuple[int, int, int, int]:
    """The same as ``stage_schedule`` sets, for any number of micro-batches."""
    row = num_stages - stage_index
    if schedule == "gpipe":
        return MANY, MANY, 0, 0
    if schedule == "1f1b":
        return row, row, 0, 0
    limit = default_max_in_flight(num_stages, stage_index)
    keeps, drops = 0, 0
    if schedule in SPLIT:
        keeps, drops = (default_max_held(num_stages, stage_index, recompute=drop) for drop in (False, True))
    return limit, min(limit, row), keeps, drops


def _arguments(problem: BorderProblem, tail_weight: float) -> tuple[Any, ...]:
    runs = problem.runs
    return (
        runs.sums,
        runs.cuts,
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
    """``[len(rows) + 2, columns]``: row 0 is not used, the last one is the link into the deepest stage."""
    schedule, rows = problem.schedule, problem.rows
    table = (rows.mean_columns if tail_weight else rows.least_columns).copy()
    inner = table[1:-1]
    inner[:, MEMORY] -= problem.margin_bytes
    if problem.slowdown != 1.0:
        inner[rows.crosses, BYTE_S] *= problem.slowdown
    np.minimum(problem.num_micro_batches, _limits(schedule, len(rows)), out=inner[:, LIMIT : HELD_AGAIN + 1])
    if schedule in (ANY, ANY_SPLIT) or (problem.frugal and schedule in OPPORTUNISTIC):
        inner[:, LEAST] = 1
    if schedule != "gpipe":  # backwards of the last stage follow their forwards at once: nothing to drop
        inner[0, KEEP], inner[0, DROP] = 1, 0
    table[-1] = table[-2]
    return table
