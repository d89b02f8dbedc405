"""Which stage keeps a layout from fitting, and how many bytes it needs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from varuna.plan.borders import BorderTable
from varuna.plan.lay import border_problem, placements_of
from varuna.plan.placement import Kind
from varuna.plan.points import Point, Points
from varuna.plan.setting import Setting

_NO_LIMIT = 1e18
"""Bytes that no model needs."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Tightest:
    """The stage furthest from fitting: its sections, its bytes and the device's."""

    point: Point
    schedule: str
    stage_index: int
    first_section: int
    end_section: int
    needed_bytes: float
    limit_bytes: float


def tightest_stage(setting: Setting, point: Point, schedule: str) -> Tightest:
    """Of the borders that would be the fastest if there were memory enough."""
    kind, table = _table(setting, point, schedule, -_NO_LIMIT)
    found = table.borders(kind.num_stages)
    assert found is not None, "borders without a limit"
    return _tightest(point, kind, schedule, table, found.borders)


def least_memory(setting: Setting, points: Points) -> Tightest:
    """Of the layout that needs least: the deepest pipelines, the smallest micro-batches, the best borders."""
    order = np.lexsort((points.micro_batch_size, -points.num_pipelines, -points.num_stages)).tolist()
    found: list[Tightest] = []
    for split in (False, True):
        index = next((index for index in order if points.split[index] == split), None)
        if index is not None:
            schedules = setting.wish.schedules_of(split=split)
            found += [_least(setting, points[index], schedule) for schedule in schedules]
    return min(found, key=lambda tightest: tightest.needed_bytes - tightest.limit_bytes)


def _least(setting: Setting, point: Point, schedule: str) -> Tightest:
    """Bisect how much more memory every device would need."""
    low, high = 0.0, _NO_LIMIT
    kind, table = _table(setting, point, schedule, -high)
    while high - low > max(1.0, 1e-4 * high):
        middle = (low + high) / 2 if low else high / 64
        _, trial = _table(setting, point, schedule, -middle)
        if np.isfinite(trial.value_s(kind.num_stages)):
            high, table = middle, trial
        else:
            low = middle
    found = table.borders(kind.num_stages)
    assert found is not None, "borders with memory enough"
    return _tightest(point, kind, schedule, table, found.borders)


def _table(setting: Setting, point: Point, schedule: str, margin_bytes: float) -> tuple[Kind, BorderTable]:
    placement = placements_of(setting, point)[0]
    kind = placement.kinds[0]
    share = -(-setting.num_micro_batches(point.micro_batch_size) // point.num_pipelines)
    problem = border_problem(
        setting,
        point,
        placement,
        kind,
        num_micro_batches=share,
        schedule=schedule,
        frugal=True,
        margin_bytes=margin_bytes,
    )
    return kind, BorderTable(problem, one_depth=True)


def _tightest(point: Point, kind: Kind, schedule: str, table: BorderTable, borders: Sequence[int]) -> Tightest:
    needs = [table.least_bytes(kind.num_stages - stage, *ends) for stage, ends in enumerate(pairwise(borders))]
    over = [need - limit for need, limit in zip(needs, kind.memory_bytes.tolist(), strict=True)]
    stage = int(np.argmax(over))
    return Tightest(
        point=point,
        schedule=schedule,
        stage_index=stage,
        first_section=borders[stage],
        end_section=borders[stage + 1],
        needed_bytes=needs[stage],
        limit_bytes=float(kind.memory_bytes[stage]),
    )
