"""Which workers are slow, by how much, and what follows: fewer micro-batches, then a rest. Pure.

A worker's pace is the median time it computes for one micro-batch over the last ``WINDOW`` steps, against those
that have the same sections in other pipelines, or against what was predicted where there are none (predictions
may all be off by the same factor: that of the faster half counts). Medians, so that a step or two in which
something else ran on the machine count for nothing; and it is *chronic* only if three quarters of the window
were slow.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low

from varuna.spec import Plan, StageSpec

WINDOW = 8
"""Steps that a judgement looks at."""

SLOW_BELOW = 0.8
"""A worker at less of its peers' speed than this is slow."""

REST_BELOW = 0.5
"""A worker at less than this gets no work, as long as the others can do without it."""

LEAST_LAG_S = 0.01
"""A worker that takes less than this longer for a micro-batch is not slow: other work costs as much."""

REST_S = 300.0
"""How long a worker rests before it is given another try; twice as long each time."""

_CHRONIC_SHARE = 0.75


@dataclass(frozen=True, kw_only=True)
class Pace:
    """One worker next to its peers.

    Attributes:
        rank: the worker.
        speed: as a share of its peers'; 1 if it is not slower.
        is_chronic: slow in most steps of the window; otherwise it was slow in a few steps at most.
        busy_s, peers_s: median seconds for a micro-batch, its own and what it is compared with.
    """

    rank: int
    speed: float
    is_chronic: bool
    busy_s: float
    peers_s: float


def paces(
    plan: Plan, busy_s: Mapping[int, Sequence[float]], predicted_s: Mapping[int, float] | None = None
) -> tuple[Pace, ...]:
    """The workers of a plan next to their peers, as far as enough is known.

    Args:
        plan: the layout.
        busy_s: per rank, seconds of computing in each of the last steps; only full windows are looked at.
        predicted_s: per rank, predicted seconds of computing for a micro-batch.
    """
    shares = {
        stage.worker_index: pipeline.num_micro_batches
        for pipeline in plan.pipelines
        for stage in pipeline.stages
    }
    stages: dict[tuple[int, int, bool], list[int]] = {}
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            stages.setdefault(_work(stage), []).append(stage.worker_index)
    own = {
        rank: [seconds / shares[rank] for seconds in steps[-WINDOW:]]
        for rank, steps in busy_s.items()
        if rank in shares and len(steps) >= WINDOW and min(steps[-WINDOW:]) > 0
    }
    expected = _expected(own, predicted_s or {})
    found = []
    for ranks in stages.values():
        for rank in ranks:
            peers = [median(own[peer]) for peer in ranks if peer != rank and peer in own]
            if not peers and rank in expected:
                peers = [expected[rank]]
            if rank in own and peers:
                found.append(_pace(rank, own[rank], median(peers)))
    return tuple(sorted(found, key=lambda pace: pace.rank))


def _expected(own: Mapping[int, Sequence[float]], predicted_s: Mapping[int, float]) -> dict[int, float]:
    """Predicted seconds for a micro-batch, times what the faster half of the workers is off by."""
    off = [median(own[rank]) / predicted_s[rank] for rank in own if predicted_s.get(rank, 0.0) > 0]
    return {rank: seconds * median_low(off) for rank, seconds in predicted_s.items()} if off else {}


def _work(stage: StageSpec) -> tuple[int, int, bool]:
    return stage.first_section, stage.end_section, stage.recompute


def _pace(rank: int, own_s: Sequence[float], peers_s: float) -> Pace:
    limit_s = max(peers_s / SLOW_BELOW, peers_s + LEAST_LAG_S)
    num_slow = sum(seconds > limit_s for seconds in own_s)
    return Pace(
        rank=rank,
        speed=min(1.0, peers_s / median(own_s)),
        is_chronic=num_slow >= _CHRONIC_SHARE * len(own_s),
        busy_s=median(own_s),
        peers_s=peers_s,
    )


def rest_s(num_rests: int, first_s: float = REST_S) -> float:
    """How long a worker rests that has rested so many times before."""
    return float(first_s * 2**num_rests)


# --- fewer micro-batches --------------------------------------------------------------------


def share_out(plan: Plan, speeds: Mapping[int, float]) -> Plan:
    """The plan with its micro-batches shared so that the slowest pipeline ends as early as it can.

    A pipeline goes at the speed of its slowest worker. The same plan if that gains nothing.

    Args:
        plan: by ranks.
        speeds: of each rank, 1 for those that are missing.
    """
    pace = _pipeline_speeds(plan, speeds)
    shares = [1] * len(pace)
    for _ in range(plan.num_micro_batches - len(pace)):
        next_one = min(range(len(pace)), key=lambda index: ((shares[index] + 1) / pace[index], index))
        shares[next_one] += 1
    pipelines = []
    first = 0
    for pipeline, share in zip(plan.pipelines, shares, strict=True):
        pipelines.append(replace(pipeline, first_micro_batch=first, end_micro_batch=first + share))
        first += share
    shared = replace(plan, pipelines=tuple(pipelines))
    return shared if relative_step_s(shared, speeds) < relative_step_s(plan, speeds) else plan


def relative_step_s(plan: Plan, speeds: Mapping[int, float]) -> float:
    """How long the slowest pipeline takes for its micro-batches, in those of a worker of speed 1."""
    pace = _pipeline_speeds(plan, speeds)
    return max(pipeline.num_micro_batches / speed for pipeline, speed in zip(plan.pipelines, pace, strict=True))


def _pipeline_speeds(plan: Plan, speeds: Mapping[int, float]) -> list[float]:
    return [
        min(speeds.get(stage.worker_index, 1.0) for stage in pipeline.stages) for pipeline in plan.pipelines
    ]
