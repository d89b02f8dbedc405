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

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

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
    tails, pipelines = _Tails(plan, profile, speeds), _Stages(plan)
    reductions = [*_of_sections(profile, pipelines, tails, end_s), *_of_ties(profile, pipelines, tails, end_s)]
    machine_of = np.asarray(machines)
    groups = {id(reduction.workers): reduction for reduction in reductions}
    slowdowns = _slowdowns(profile, list(groups.values()), machine_of)
    slowdown_of = dict(zip(groups, slowdowns, strict=True))
    free_s = np.zeros_like(end_s)
    for reduction in sorted(reductions, key=lambda reduction: float(reduction.ready_s.max())):
        ready_s = reduction.ready_s if profile.reduces_beside else end_s[reduction.workers]
        start_s = max(float(ready_s.max()), float(free_s[reduction.workers].max()))
        slowdown = slowdown_of[id(reduction.workers)]
        free_s[reduction.workers] = start_s + _duration_s(profile, reduction, slowdown)
    return np.maximum(free_s, end_s)


def _slowdowns(profile: Profile, groups: Sequence[_Reduction], machine_of: Ints) -> list[float | None]:
    """Per group, how much longer its all-reduces take for others that leave its machines; None if it is on one.

    A machine's workers cannot be in more all-reduces at a time than they are.
    """
    crossing = np.zeros((2, int(machine_of.max()) + 1))
    present = np.zeros(len(machine_of), dtype=bool)
    used = [np.unique(machine_of[group.workers]) for group in groups]
    seen: set[tuple[int, ...]] = set()
    for group, machines in zip(groups, used, strict=True):
        present[group.workers] = True
        workers = (int(group.tied), *group.workers.tolist())
        if len(machines) > 1 and workers not in seen:
            crossing[int(group.tied), machines] += 1
        seen.add(workers)
    crossing = np.minimum(crossing, np.bincount(machine_of[present], minlength=crossing.shape[1]))
    link = profile.across_machines
    ratio = link.bytes_per_s / link.shared_bytes_per_s if link.shared_bytes_per_s > 0 else 0.0
    return [
        None if len(machines) == 1 else max(1.0, float(crossing[int(group.tied), machines].max()) * ratio)
        for group, machines in zip(groups, used, strict=True)
    ]


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

    def of(self, stages: Sequence[StageSpec]) -> Callable[[int], Floats]:
        """Seconds that the sections before a given one take in each pipeline's last task, a stage for each."""
        start_s = self._before_s[0, [stage.first_section for stage in stages]]
        start_s[self._last] = self._before_s[1, stages[-1].first_section]
        speeds = self._speeds[[stage.worker_index for stage in stages]]

        def before(section_index: int) -> Floats:
            seconds = self._before_s[0, section_index] - start_s
            seconds[self._last] = self._before_s[1, section_index] - start_s[self._last]
            tails: Floats = seconds / speeds
            return tails

        return before


def _of_sections(profile: Profile, pipelines: _Stages, tails: _Tails, end_s: Floats) -> Iterator[_Reduction]:
    """Buckets of what each section alone uses; sections between two borders have the same holders."""
    if pipelines.count == 1:
        return
    tied = np.zeros(len(profile.sections))
    for tie in profile.ties:
        tied[list(tie.section_indices)] += tie.num_bytes
    first = 0
    for end in pipelines.ends:
        stages = pipelines.at(first)
        workers = np.array([stage.worker_index for stage in stages])
        own_end_s, before = end_s[workers], tails.of(stages)
        waiting = 0.0
        for index in range(end - 1, first - 1, -1):
            waiting += max(0.0, profile.sections[index].gradient_bytes - tied[index])
            if waiting >= BUCKET_BYTES or (index == first and waiting > 0):
                yield _Reduction(workers, waiting, own_end_s - before(index), tied=False)
                waiting = 0.0
        first = end


def _of_ties(profile: Profile, pipelines: _Stages, tails: _Tails, end_s: Floats) -> Iterator[_Reduction]:
    for tie in profile.ties:
        ready_s: dict[int, float] = {}
        for index in sorted(tie.section_indices, reverse=True):  # backward comes to the first one last
            stages = pipelines.at(index)
            for stage, tail_s in zip(stages, tails.of(stages)(index).tolist(), strict=True):
                ready_s[stage.worker_index] = float(end_s[stage.worker_index]) - tail_s
        if len(ready_s) > 1:
            yield _Reduction(
                np.array(list(ready_s)), tie.num_bytes, np.array(list(ready_s.values())), tied=True
            )


class _Stages:
    """The stages of every pipeline, by section."""

    def __init__(self, plan: Plan) -> None:
        self._stages = [pipeline.stages for pipeline in plan.pipelines]
        self._ends = [[stage.end_section for stage in stages] for stages in self._stages]
        self.ends = sorted(set(chain.from_iterable(self._ends)))
        self.count = len(plan.pipelines)

    def at(self, section_index: int) -> list[StageSpec]:
        """The stage of every pipeline that holds a section."""
        pairs = zip(self._stages, self._ends, strict=True)
        return [stages[bisect_right(ends, section_index)] for stages, ends in pairs]


def _duration_s(profile: Profile, reduction: _Reduction, slowdown: float | None) -> float:
    """Several buckets of full size one after the other, or one."""
    num_buckets = max(1.0, reduction.num_bytes / BUCKET_BYTES)
    num_bytes = reduction.num_bytes / num_buckets
    seconds = num_buckets * all_reduce_s(profile, len(reduction.workers), num_bytes, slowdown is not None)
    return seconds * (slowdown or 1.0)
