"""Which plan is the fastest for a profile and a cluster, and why."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.plan.cluster import Cluster
from varuna.plan.layout import PlanChoice
from varuna.plan.predict import Prediction
from varuna.plan.profile import Profile
from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """One layout that was considered.

    Attributes:
        num_stages, num_pipelines, micro_batch_size: P, D and m.
        num_micro_batches: of the pipeline that runs most of them.
        schedule: its schedule; empty where a bound ruled it out for every schedule.
        step_s: seconds of a step: simulated, or at least so many; 0 where nothing fits.
        simulated: ``step_s`` is a simulation's; otherwise a lower bound.
        bubble: share of worker-seconds in which no task runs; None if not simulated.
        communication_s: seconds of a step that the slowest pipeline's messages and reductions are exposed, that is
            what the step would save if they were free; None if not simulated.
        memory_bytes: of the fullest device; 0 if unknown.
        rejected: why it is not the choice; empty for the choice itself.
    """

    num_stages: int
    num_pipelines: int
    micro_batch_size: int
    num_micro_batches: int
    schedule: str
    step_s: float
    simulated: bool
    bubble: float | None = None
    communication_s: float | None = None
    memory_bytes: int = 0
    rejected: str = ""


@dataclass(frozen=True, kw_only=True)
class Choice:
    """The plan, what it will take, and what else was considered.

    Attributes:
        plan: the fastest plan found.
        prediction: of that plan.
        candidates: all that were considered, the choice first, then by ``step_s``.
        reason: one or two sentences for a person.
    """

    plan: Plan
    prediction: Prediction
    candidates: tuple[Candidate, ...]
    reason: str

    def to_plan_choice(self) -> PlanChoice:
        """What workers are sent."""
        return PlanChoice(plan=self.plan, reason=self.reason)


def choose_plan(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    num_stages: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str | None = None,
    recompute: bool | Sequence[bool] | None = None,
) -> Choice:
    """The plan with the least simulated step time.

    Args:
        profile: of the model on one device.
        cluster: the machines present; worker i is the i-th device.
        batch_size: samples of a global batch.
        num_stages, micro_batch_size, schedule: P, m and schedule, where the user fixed them.
        recompute: whether stages recompute, for all or one flag for each; None decides per stage.

    Raises:
        PlanError: nothing fits, or what was fixed cannot be laid out; with values and what would help.
    """
    raise NotImplementedError  # the search follows: others need its signature first
