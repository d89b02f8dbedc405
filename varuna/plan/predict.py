"""What one step of a plan will take, in time and memory, worker by worker.

A step is from one commit to the next: a worker begins when its own update is done. Every pipeline's tasks and
messages are simulated (``pipeline.py``: what is assumed about them; ``arrays.py``: links and how they are
shared), then the reductions that overlap with their end (``reductions.py``), then the commit, which waits for
all. What is left out: loading data, and that computing and sending may slow each other down.

Times count from when the first worker is done with its update.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial

import numpy as np

from varuna.errors import PlanError
from varuna.plan.arrays import CostsOf, PipelineShape, arrays_of, shapes_of
from varuna.plan.cluster import Cluster
from varuna.plan.costs import stage_costs
from varuna.plan.kernel import Floats
from varuna.plan.memory import resident_bytes, stage_bytes
from varuna.plan.pace import Draw
from varuna.plan.pipeline import PipelineRun, run_pipeline
from varuna.plan.profile import Profile
from varuna.plan.reductions import reduced_s
from varuna.plan.simulate import TaskSpan
from varuna.spec import PipelineSpec, Plan


@dataclass(frozen=True, kw_only=True)
class StagePrediction:
    """One worker of a pipeline.

    Attributes:
        worker_index: the worker.
        busy_s: seconds of its tasks.
        reduce_s: seconds from the end of its last task until all its gradients are reduced.
        peak_in_flight: most micro-batches between forward and backward.
        peak_memory_bytes: most memory of its device.
        spans: its tasks in seconds from the start of the step, if recorded.
    """

    worker_index: int
    busy_s: float
    reduce_s: float
    peak_in_flight: int
    peak_memory_bytes: int
    spans: tuple[TaskSpan, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PipelinePrediction:
    """One pipeline: from the start of the step to the end of its last task."""

    makespan_s: float
    stages: tuple[StagePrediction, ...]


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """One step of a plan.

    Attributes:
        step_s: the whole step: tasks, reduction, commit, update.
        pipelines: in the plan's order.
        bubble: share of the step's worker-seconds in which no task runs, over the workers in use.
        reduce_s: seconds between the end of the last task of all and the last reduced gradient.
        samples_per_s: global batch over ``step_s``.
    """

    step_s: float
    pipelines: tuple[PipelinePrediction, ...]
    bubble: float
    reduce_s: float
    samples_per_s: float


MAX_DRAWS = 8
"""Where links or devices have jitter, pipelines of the same shape share this many simulated steps."""


def predict(
    plan: Plan, profile: Profile, cluster: Cluster, *, seed: int = 0, num_runs: int = 1, record: bool = False
) -> Prediction:
    """Simulate one step of ``plan``.

    Args:
        plan: the layout.
        profile: what its tasks and messages cost.
        cluster: where its workers are; worker i is the i-th device.
        seed: of the drawn delays of messages and paces of devices.
        num_runs: steps to average over; 1 is enough where the profile has no jitter.
        record: keep the spans of the first run.

    Raises:
        PlanError: plan, profile and cluster do not fit together.
    """
    _check(plan, profile, cluster, num_runs)
    machines = cluster.machine_indices()
    speeds = tuple(machine.speed for machine in cluster.machines for _ in range(machine.num_workers))
    costs_of = cache(partial(stage_costs, profile))
    resident_of = cache(partial(resident_bytes, profile))
    shapes = shapes_of(plan, profile, machines, speeds, costs_of)
    update_s = _update_s(plan, profile, speeds)
    used = [stage.worker_index for pipeline in plan.pipelines for stage in pipeline.stages]
    least_update_s = float(update_s[used].min())
    start_s = update_s - least_update_s
    runs = []
    count = num_runs if profile.has_jitter else 1
    for index in range(count):
        simulate = partial(
            _simulate,
            profile=profile,
            costs_of=costs_of,
            resident_of=resident_of,
            draw=partial(Draw, seed, index, count),
            record=record and index == 0,
        )
        runs.append(_run_pipelines(plan, shapes, start_s, MAX_DRAWS if profile.has_jitter else 1, simulate))
    steps = []
    for results in runs:
        end_s = np.zeros(plan.num_workers)
        for pipeline, result in zip(plan.pipelines, results, strict=True):
            end_s[[stage.worker_index for stage in pipeline.stages]] = result.run.end_s
        steps.append((end_s, reduced_s(plan, profile, machines, speeds, end_s)))
    last_s = float(np.mean([end_s.max() for end_s, _ in steps]))
    all_reduced_s = float(np.mean([done_s.max() for _, done_s in steps]))
    step_s = all_reduced_s + profile.step_overhead_s + least_update_s
    busy_s = float(np.mean([sum(sum(result.busy_s) for result in results) for results in runs]))
    exposed_s = np.mean([done_s - end_s for end_s, done_s in steps], axis=0).tolist()
    return Prediction(
        step_s=step_s,
        pipelines=tuple(
            _pipeline_prediction(pipeline, [results[index] for results in runs], exposed_s)
            for index, pipeline in enumerate(plan.pipelines)
        ),
        bubble=1.0 - busy_s / (len(used) * step_s),
        reduce_s=all_reduced_s - last_s,
        samples_per_s=plan.batch_size / step_s,
    )


@dataclass(frozen=True)
class _Simulated:
    """One pipeline's run, and per stage numbers of it."""

    run: PipelineRun
    busy_s: list[float]
    peak_in_flight: list[int]
    peak_memory_bytes: list[int]


def _simulate(
    shape: PipelineShape,
    start_s: Floats,
    index: int,
    num_pipelines: int,
    *,
    profile: Profile,
    costs_of: CostsOf,
    resident_of: Callable[..., int],
    draw: Callable[[int], Draw],
    record: bool,
) -> _Simulated:
    run = run_pipeline(arrays_of(shape, profile, costs_of, start_s, draw(index)), record=record)
    memory = [
        stage_bytes(
            costs_of(stage.first_section, stage.end_section, shape.micro_batch_size),
            resident_of(stage.first_section, stage.end_section, num_holders=num_pipelines),
            kept_bytes=float(run.peak_bytes[index]),
            num_waiting=(int(run.peak_waiting[index, 0]), int(run.peak_waiting[index, 1])),
        )
        for index, stage in enumerate(shape.stages)
    ]
    return _Simulated(run, run.busy_s.tolist(), run.peak_in_flight.tolist(), memory)


def _run_pipelines(
    plan: Plan,
    shapes: Sequence[PipelineShape],
    start_s: Floats,
    num_draws: int,
    simulate: Callable[[PipelineShape, Floats, int, int], _Simulated],
) -> list[_Simulated]:
    """One step of every pipeline; those of one shape (object) are simulated ``num_draws`` times at most."""
    counts: Counter[int] = Counter()
    known: dict[tuple[int, int], _Simulated] = {}
    results = []
    for pipeline, shape in zip(plan.pipelines, shapes, strict=True):
        key = (id(shape), counts[id(shape)] % num_draws)
        counts[id(shape)] += 1
        if key not in known:
            own_start_s = start_s[[stage.worker_index for stage in pipeline.stages]]
            known[key] = simulate(shape, own_start_s, len(known), len(plan.pipelines))
        results.append(known[key])
    return results


def _update_s(plan: Plan, profile: Profile, speeds: Sequence[float]) -> Floats:
    """Per worker, seconds of the optimizer; 0 for spares."""
    before = np.concatenate(([0.0], np.cumsum([section.update_s for section in profile.sections])))
    seconds = np.zeros(plan.num_workers)
    for pipeline in plan.pipelines:
        for stage in pipeline.stages:
            own = before[stage.end_section] - before[stage.first_section]
            seconds[stage.worker_index] = own / speeds[stage.worker_index]
    return seconds


def _pipeline_prediction(
    pipeline: PipelineSpec, results: Sequence[_Simulated], exposed_s: Sequence[float]
) -> PipelinePrediction:
    """Means of times and the most of what is in memory, over several runs."""
    first = results[0]
    busy_s = [sum(each) / len(each) for each in zip(*(result.busy_s for result in results), strict=True)]
    in_flight = [max(each) for each in zip(*(result.peak_in_flight for result in results), strict=True)]
    memory = [max(each) for each in zip(*(result.peak_memory_bytes for result in results), strict=True)]
    return PipelinePrediction(
        makespan_s=sum(result.run.makespan_s for result in results) / len(results),
        stages=tuple(
            StagePrediction(
                worker_index=stage.worker_index,
                busy_s=busy_s[index],
                reduce_s=exposed_s[stage.worker_index],
                peak_in_flight=in_flight[index],
                peak_memory_bytes=memory[index],
                spans=first.run.spans[index] if first.run.spans else (),
            )
            for index, stage in enumerate(pipeline.stages)
        ),
    )


def _check(plan: Plan, profile: Profile, cluster: Cluster, num_runs: int) -> None:
    if plan.num_sections != len(profile.sections):
        raise PlanError(
            f"The plan is for a model of {plan.num_sections} sections, the profile for one of "
            f"{len(profile.sections)} ({profile.model}). Use the profile of the same model and cut points."
        )
    if plan.num_workers > cluster.num_workers:
        raise PlanError(
            f"The plan is for {plan.num_workers} workers, and the machines have {cluster.num_workers}. Give "
            f"machines with at least as many devices."
        )
    if num_runs < 1:
        raise PlanError(f"num_runs={num_runs} must be at least 1.")
