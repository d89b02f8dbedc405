"""What a search considered, as rows for people: simulated, ruled out by a bound, or too large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from varuna.plan.outcome import Outcome, simulate
from varuna.plan.points import Point
from varuna.plan.predict import Prediction
from varuna.plan.render import format_bytes
from varuna.plan.search import BY_ESTIMATE, DOES_NOT_FIT, Ruled, Search
from varuna.plan.setting import Setting
from varuna.plan.tightest import tightest_stage

DETAILED = 2
"""Times the search's patience: so many of the fastest are simulated again with free messages, to tell
communication; and so many of those that do not fit get told which stage, and by how much.
"""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that was considered.

    Attributes:
        num_stages, num_pipelines, micro_batch_size: P, D and m.
        num_micro_batches: of the pipeline that runs most of them.
        num_deeper: pipelines, among the D, that have P + 1 stages.
        schedule: its schedule; or several, separated by commas, that were ruled out together.
        layout: ``pipelines`` or ``replicas`` on one machine (see ``placement``); empty if not simulated.
        step_s: seconds of a step: simulated, or at least so many; infinite if it does not fit.
        simulated: ``step_s`` is a simulation's; otherwise a lower bound.
        bubble: share of worker-seconds in which no task runs; None if not simulated.
        communication_s: what a step would save if messages and reductions took no time; None if not known.
        memory_bytes: of the fullest device; 0 if not known.
        num_recompute: stages of a pipeline that recompute.
        rejected: why it is not the choice; empty for the choice itself.
    """

    num_stages: int
    num_pipelines: int
    micro_batch_size: int
    num_micro_batches: int
    num_deeper: int = 0
    schedule: str = ""
    layout: str = ""
    step_s: float
    simulated: bool
    bubble: float | None = None
    communication_s: float | None = None
    memory_bytes: int = 0
    num_recompute: int = 0
    rejected: str = ""


def candidates_of(
    search: Search, chosen: Outcome, predictions: Mapping[int, Prediction]
) -> tuple[Candidate, ...]:
    """The choice, then all else by step time, what does not fit last.

    Args:
        search: what was looked at.
        chosen: the outcome that became the plan.
        predictions: of outcomes by ``id``, where there is one.
    """
    best_s = predictions[id(chosen)].step_s
    num_detailed, num_told = int(DETAILED * search.patience), 0
    rows = simulated_candidates(search, chosen, predictions, num_detailed=num_detailed)
    for ruled in search.ruled:
        rows.append(_ruled(search.setting, ruled, best_s, detailed=num_told < num_detailed))
        num_told += ruled.why == DOES_NOT_FIT
    rows += _unopened(search, best_s)
    return tuple(sorted(rows, key=_by_time))


def simulated_candidates(
    search: Search, chosen: Outcome, predictions: Mapping[int, Prediction], *, num_detailed: int = 0
) -> list[Candidate]:
    """Those among ``candidates_of`` that were simulated, which is quick to tell without details."""
    best_s = predictions[id(chosen)].step_s
    order = sorted(search.outcomes, key=lambda outcome: (outcome is not chosen, outcome.step_s))
    rows = []
    for index, outcome in enumerate(order):
        row = _simulated(search.setting, outcome, best_s if index else None, detailed=index < num_detailed)
        prediction = predictions.get(id(outcome))
        if prediction is not None:
            rejected = _slower(prediction.step_s, best_s) if index else ""
            row = replace(row, step_s=prediction.step_s, bubble=prediction.bubble, rejected=rejected)
        rows.append(row)
    return sorted(rows, key=_by_time)


def _by_time(row: Candidate) -> tuple[bool, float]:
    return row.rejected != "", row.step_s


def _simulated(setting: Setting, outcome: Outcome, best_s: float | None, *, detailed: bool) -> Candidate:
    """``best_s`` is None for the choice itself."""
    laid = outcome.laid
    saved_s = outcome.step_s - simulate(setting, laid, free_communication=True).step_s if detailed else None
    return _row(
        setting,
        laid.point,
        outcome.step_s,
        schedule=laid.schedule,
        layout=laid.placement.layout,
        simulated=True,
        bubble=outcome.bubble,
        communication_s=None if saved_s is None else max(0.0, saved_s),
        memory_bytes=outcome.memory_bytes,
        num_recompute=max(sum(plan.borders.recompute) for plan in laid.kinds),
        rejected="" if best_s is None else _slower(outcome.step_s, best_s),
    )


def _ruled(setting: Setting, ruled: Ruled, best_s: float, *, detailed: bool) -> Candidate:
    step_s, why = ruled.point.bound_s, ruled.why
    if why == DOES_NOT_FIT:
        step_s, why = np.inf, _excess(setting, ruled) if detailed else why
    elif why == "":
        why = _not_faster(step_s, best_s)
    return _row(setting, ruled.point, step_s, schedule=ruled.schedule, rejected=why)


def _unopened(search: Search, best_s: float) -> list[Candidate]:
    """A row for each P, D and kind of schedule of which no m was looked at more closely: of the least bound."""
    points, setting = search.points, search.setting
    assert points is not None, "the search was run"
    least_s = np.where(points.fits, points.bound_s, np.inf)
    keys = (points.num_stages * (1 + int(points.num_pipelines.max())) + points.num_pipelines) * 2 + points.split
    order = np.lexsort((points.micro_batch_size, least_s, keys))
    opened = set(keys[list(search.opened)].tolist())
    schedules = {split: ", ".join(setting.wish.schedules_of(split=split)) for split in (False, True)}
    rows = []
    for index in order[np.unique(keys[order], return_index=True)[1]].tolist():
        if int(keys[index]) in opened:
            continue
        point, step_s = points[index], float(least_s[index])
        if not points.fits[index]:
            why = _static_excess(setting, point)
        elif step_s >= best_s:
            why = f"{_not_faster(step_s, best_s)}, whatever m"
        else:
            why = f"{BY_ESTIMATE}, whatever m" if search.is_complete else "estimated slower, not looked at"
        rows.append(_row(setting, point, step_s, schedule=schedules[point.split], rejected=why))
    return rows


def _row(setting: Setting, point: Point, step_s: float, *, simulated: bool = False, **values: Any) -> Candidate:
    num = setting.num_micro_batches(point.micro_batch_size)
    return Candidate(
        num_stages=point.num_stages,
        num_pipelines=point.num_pipelines,
        micro_batch_size=point.micro_batch_size,
        num_micro_batches=-(-num // point.num_pipelines),
        num_deeper=point.num_deeper,
        step_s=step_s,
        simulated=simulated,
        **values,
    )


def _slower(step_s: float, best_s: float) -> str:
    share = step_s / best_s - 1
    return f"{share:.1%} slower" if share >= 0.0005 else "as fast"


def _not_faster(bound_s: float, best_s: float) -> str:
    """What a lower bound says."""
    share = bound_s / best_s - 1
    return f"at least {share:.1%} slower" if share >= 0.0005 else "cannot be faster"


def _static_excess(setting: Setting, point: Point) -> str:
    memory = float(setting.devices.memory_bytes.max())
    if point.least_bytes <= memory:
        return f"{DOES_NOT_FIT}: some stage needs more than {format_bytes(memory)}, whatever the borders"
    return (
        f"{DOES_NOT_FIT}: parameters, gradients and optimizer alone take {format_bytes(point.least_bytes)} on "
        f"a device of {format_bytes(memory)}"
    )


def _excess(setting: Setting, ruled: Ruled) -> str:
    if ruled.needed_bytes:
        return f"{DOES_NOT_FIT}: with messages that wait, a device needs {format_bytes(ruled.needed_bytes)}"
    tight = tightest_stage(setting, ruled.point, ruled.schedule)
    return (
        f"{DOES_NOT_FIT}: stage {tight.stage_index} needs {format_bytes(tight.needed_bytes)} of "
        f"{format_bytes(tight.limit_bytes)}"
    )
