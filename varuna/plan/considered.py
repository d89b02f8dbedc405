"""What a search considered, as rows for people: simulated, ruled out by a bound, or too large."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace

import numpy as np

from varuna.plan.evaluate import Evaluator, Outcome
from varuna.plan.predict import Prediction
from varuna.plan.render import format_bytes
from varuna.plan.search import Ruled, Search
from varuna.plan.space import Point

DETAILED = 40
"""So many of the fastest simulated layouts are simulated again with free messages, to tell communication."""


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that was considered.

    Attributes:
        num_stages, num_pipelines, micro_batch_size: P, D and m.
        num_micro_batches: of the pipeline that runs most of them.
        num_deeper: pipelines, among the D, that have P + 1 stages.
        schedule: its schedule; empty where a bound ruled it out for every schedule.
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
    order = sorted(search.outcomes, key=lambda outcome: outcome.step_s)
    best_s = predictions[id(chosen)].step_s
    rows = []
    for index, outcome in enumerate(order):
        row = _simulated(search.evaluator, outcome, detailed=index < DETAILED)
        prediction = predictions.get(id(outcome))
        if prediction is not None:
            row = replace(row, step_s=prediction.step_s, bubble=prediction.bubble)
        if outcome is not chosen:
            row = replace(row, rejected=f"{row.step_s / best_s - 1:.1%} slower")
        rows.append(row)
    ruled = [_ruled(search.evaluator, each, best_s) for each in search.ruled]
    rest = sorted([*rows, *ruled, *_unopened(search, best_s)], key=lambda row: (row.rejected != "", row.step_s))
    return tuple(rest)


def _simulated(evaluator: Evaluator, outcome: Outcome, *, detailed: bool) -> Candidate:
    laid = outcome.laid
    free_s = evaluator.simulate(laid, free_communication=True).step_s if detailed else None
    return Candidate(
        num_stages=laid.point.num_stages,
        num_pipelines=laid.point.num_pipelines,
        micro_batch_size=laid.point.micro_batch_size,
        num_micro_batches=max(plan.num_micro_batches for plan in laid.kinds),
        num_deeper=laid.point.num_deeper,
        schedule=laid.schedule,
        layout=laid.placement.layout,
        step_s=outcome.step_s,
        simulated=True,
        bubble=outcome.bubble,
        communication_s=None if free_s is None else max(0.0, outcome.step_s - free_s),
        memory_bytes=outcome.memory_bytes,
        num_recompute=max(sum(plan.borders.recompute) for plan in laid.kinds),
    )


def _ruled(evaluator: Evaluator, ruled: Ruled, best_s: float) -> Candidate:
    row = _unsimulated(evaluator, ruled.point, ruled.bound_s)
    if ruled.why:
        return replace(row, schedule=ruled.schedule, step_s=np.inf, rejected=ruled.why)
    return replace(row, schedule=ruled.schedule, rejected=_slower(ruled.bound_s, best_s))


def _unopened(search: Search, best_s: float) -> list[Candidate]:
    """One row for each P and D none of whose points was looked at more closely: the point of the least bound."""
    space, evaluator = search.space, search.evaluator
    opened = {
        (int(space.num_stages[i]), int(space.num_pipelines[i]), int(space.num_deeper[i])) for i in search.opened
    }
    bound_s = np.where(space.fits, space.bound_s, np.inf)
    order = np.lexsort((bound_s, space.num_deeper, space.num_pipelines, space.num_stages))
    rows, last = [], None
    for index in order.tolist():
        key = (int(space.num_stages[index]), int(space.num_pipelines[index]), int(space.num_deeper[index]))
        if key == last or key in opened:
            continue
        last = key
        row = _unsimulated(evaluator, space.point(index), float(bound_s[index]))
        if space.fits[index]:
            rows.append(replace(row, rejected=f"{_slower(row.step_s, best_s)}, with any m and schedule"))
        else:
            rows.append(replace(row, rejected=does_not_fit(evaluator, space.point(index))))
    return rows


def _unsimulated(evaluator: Evaluator, point: Point, step_s: float) -> Candidate:
    num = -(-evaluator.wish.batch_size // point.micro_batch_size)
    return Candidate(
        num_stages=point.num_stages,
        num_pipelines=point.num_pipelines,
        micro_batch_size=point.micro_batch_size,
        num_micro_batches=-(-num // point.num_pipelines),
        num_deeper=point.num_deeper,
        step_s=step_s,
        simulated=False,
    )


def _slower(bound_s: float, best_s: float) -> str:
    if bound_s > best_s:
        return f"at least {bound_s / best_s - 1:.1%} slower"
    return "not simulated: at best as fast by the share that a bound is loose"


def does_not_fit(evaluator: Evaluator, point: Point) -> str:
    """What a device would need at least, and what there is."""
    memory = float(evaluator.devices.memory_bytes.max())
    if point.least_bytes > memory:
        return (
            f"does not fit: parameters, gradients and optimizer alone take {format_bytes(point.least_bytes)} on "
            f"a device of {format_bytes(memory)}"
        )
    tight = evaluator.tightest(point)
    return (
        f"does not fit: stage {tight.stage_index} needs {format_bytes(tight.needed_bytes)} of "
        f"{format_bytes(tight.limit_bytes)}"
    )
