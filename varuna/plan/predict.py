"""What one step of a plan will take, in time and memory, worker by worker."""

from __future__ import annotations

from dataclasses import dataclass

from varuna.plan.cluster import Cluster
from varuna.plan.profile import Profile
from varuna.plan.simulate import TaskSpan
from varuna.spec import Plan


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


def predict(
    plan: Plan, profile: Profile, cluster: Cluster, *, seed: int = 0, num_runs: int = 1, record: bool = False
) -> Prediction:
    """Simulate one step of ``plan``.

    Args:
        plan: the layout.
        profile: what its tasks and messages cost.
        cluster: where its workers are; worker i is the i-th device.
        seed: of the drawn delays of messages.
        num_runs: steps to average over; 1 is enough where the profile has no jitter.
        record: keep the spans of the first run.

    Raises:
        PlanError: plan, profile and cluster do not fit together.
    """
    raise NotImplementedError  # written next: the event loop that it stands on comes first
