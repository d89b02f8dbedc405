"""When every worker has the summed gradients: the all-reduces of a step, which overlap with its last backwards.

As ``varuna.run.reduce`` does it: gradients of sections with the same holders travel together in buckets; a
bucket leaves once the last micro-batch's backward (or weight task) has passed its sections on every holder;
parameters that several stages use are summed over all of their holders. Assumed: a worker takes part in one
all-reduce at a time, in the order in which they become ready; computing does not slow down meanwhile (where
``Profile.reduces_beside`` is False it would: there reductions are taken to come after it); the stages' groups
that leave the same machine share ``shared_bytes_per_s``, and so do those of what several stages use, which come
after them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from varuna.plan.costs import all_reduce_s, section_costs
from varuna.plan.kernel import Floats
from varuna.plan.memory import BUCKET_BYTES
from varuna.plan.profile import Profile
from varuna.spec import Plan, StageSpec

Ints = NDArray[np.int64]


@dataclass(frozen=True)
class _Reduction:
    """Bytes summed over ``workers``; each has its own from ``ready_s`` on; ``tied`` if stages share them."""

    workers: Ints
    num_bytes: float
    ready_s: Floats
    tied: bool


def reduced_s(
    plan: Plan, profile: Profile, machines: Sequence[int], speeds: Sequence[float], end_s: Floats
) -> Floats:
    """When each worker's last gradient is summed: [workers], not before ``end_s``, the end of its last task."""
    if len(plan.pipelines) == 1 and not profile.ties:
        return end_s
    tails = _Tails(plan, profile, speeds)
    reductions = [*_of_sections(plan, profile, tails, end_s), *_of_ties(plan, profile, tails, end_s)]
    machine_of = np.asarray(machines)
    crossing = np.zeros((2, max(machines) + 1))
    for tied, workers in {(reduction.tied, tuple(reduction.workers.tolist())) for reduction in reductions}:
        used = np.unique(machine_of[list(workers)])
        if len(used) > 1:
            crossing[int(tied), used] += 1
    present = np.unique([worker for reduction in reductions for worker in reduction.workers.tolist()])
    crossing = np.minimum(crossing, np.bincount(machine_of[present.astype(int)], minlength=crossing.shape[1]))
    free_s = np.zeros_like(end_s)
    for reduction in sorted(reductions, key=lambda reduction: float(reduction.ready_s.max())):
        ready_s = reduction.ready_s if profile.reduces_beside else end_s[reduction.workers]
        start_s = max(float(ready_s.max()), float(free_s[reduction.workers].max()))
        duration_s = _duration_s(
            profile, reduction, machine_of[reduction.workers], crossing[int(reduction.tied)]
        )
        free_s[reduction.workers] = start_s + duration_s
    return np.maximum(free_s, end_s)


class _Tails:
    """For how long before the end of its last task a stage has been through with a section's gradients."""

    def __init__(self, plan: Plan, profile: Profile, speeds: Sequence[float]) -> None:
        last = len(plan.micro_batch_samples(plan.num_micro_batches - 1))
        sizes = (plan.micro_batch_size, last)
        costs = [[section_costs(section, size) for section in profile.sections] for size in sizes]
        split = plan.schedule == "zero-bubble"
        seconds = [[cost.weight_s if split else cost.backward_s for cost in row] for row in costs]
        self._before_s = np.concatenate((np.zeros((2, 1)), np.cumsum(seconds, axis=1)), axis=1)
        self._last = len(plan.pipelines) - 1  # has the short micro-batch
        self._speeds = np.asarray(speeds)

    def of(self, stages: Sequence[StageSpec], section_index: int) -> Floats:
        """Seconds that the sections before one take in each pipeline's last task; a stage for each pipeline."""
        firsts = [stage.first_section for stage in stages]
        seconds = self._before_s[0, section_index] - self._before_s[0, firsts]
        short = self._before_s[1, section_index] - self._before_s[1, firsts[-1]]
        seconds[self._last] = short
        tails: Floats = seconds / self._speeds[[stage.worker_index for stage in stages]]
        return tails


def _of_sections(plan: Plan, profile: Profile, tails: _Tails, end_s: Floats) -> Iterator[_Reduction]:
    """Buckets of what each section alone uses; sections between two borders have the same holders."""
    if len(plan.pipelines) == 1:
        return
    tied = np.zeros(len(profile.sections))
    for tie in profile.ties:
        tied[list(tie.section_indices)] += tie.num_bytes
    first = 0
    for end in sorted({stage.end_section for pipeline in plan.pipelines for stage in pipeline.stages}):
        stages = _stages_at(plan, first)
        workers = np.array([stage.worker_index for stage in stages])
        waiting = 0.0
        for index in range(end - 1, first - 1, -1):
            waiting += max(0.0, profile.sections[index].gradient_bytes - tied[index])
            if waiting >= BUCKET_BYTES or (index == first and waiting > 0):
                yield _Reduction(workers, waiting, end_s[workers] - tails.of(stages, index), tied=False)
                waiting = 0.0
        first = end


def _of_ties(plan: Plan, profile: Profile, tails: _Tails, end_s: Floats) -> Iterator[_Reduction]:
    for tie in profile.ties:
        ready_s: dict[int, float] = {}
        for index in sorted(tie.section_indices, reverse=True):  # backward comes to the first one last
            stages = _stages_at(plan, index)
            for stage, tail_s in zip(stages, tails.of(stages, index).tolist(), strict=True):
                ready_s[stage.worker_index] = float(end_s[stage.worker_index]) - tail_s
        if len(ready_s) > 1:
            yield _Reduction(
                np.array(list(ready_s)), tie.num_bytes, np.array(list(ready_s.values())), tied=True
            )


def _stages_at(plan: Plan, section_index: int) -> list[StageSpec]:
    """The stage of every pipeline that holds a section."""
    return [
        next(stage for stage in pipeline.stages if section_index < stage.end_section)
        for pipeline in plan.pipelines
    ]


def _duration_s(profile: Profile, reduction: _Reduction, machines: Ints, crossing: Floats) -> float:
    """Several buckets of full size one after the other, or one."""
    across = bool((machines != machines[0]).any())
    num_buckets = max(1.0, reduction.num_bytes / BUCKET_BYTES)
    num_bytes = reduction.num_bytes / num_buckets
    seconds = num_buckets * all_reduce_s(profile, len(reduction.workers), num_bytes, across)
    link = profile.across_machines
    if across and link.shared_bytes_per_s > 0:
        seconds *= max(1.0, float(crossing[machines].max()) * link.bytes_per_s / link.shared_bytes_per_s)
    return seconds
