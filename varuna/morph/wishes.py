"""Why a generation that runs should end after its step: somebody leaves, or newcomers are worth it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from varuna.morph.arrange import try_plan
from varuna.morph.decision import JoinAction, JoinOutlook, JoinVerdict, decide_join, morph_cost_s
from varuna.morph.planning import PlanFor, Planned
from varuna.morph.record import JobRecord, WorkerStatus
from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What should happen to the generation, and why.

    Attributes:
        reason: for people; empty if there is nothing to say.
        pause: end it after the step under way.
        until_s: look again then.
    """

    reason: str = ""
    pause: bool = False
    until_s: float | None = None


def wish_of(job: JobRecord, plan_for: PlanFor, now_s: float) -> Wish:
    """What should happen to the generation that runs."""
    assert job.description is not None
    members = job.members()
    leavers = [member for member in members if member.leaving is not None]
    ready = job.ready()
    if leavers:
        num_staying = len(members) - len(leavers) + len(ready)
        who = ", ".join(f"{one.incarnation} ({one.leaving.source})" for one in leavers if one.leaving)
        without = try_plan(plan_for, num_staying, job.description)
        if isinstance(without, Planned):
            return Wish(reason=f"asked to leave: {who}", pause=True)
        return Wish(reason=f"asked to leave, but still needed: {who}; without: {without.reason}")
    if ready:
        verdict = _join(job, plan_for, now_s)
        return Wish(reason=verdict.reason, pause=verdict.action is JoinAction.MORPH, until_s=verdict.until_s)
    return Wish()


def _join(job: JobRecord, plan_for: PlanFor, now_s: float) -> JoinVerdict:
    assert job.description is not None
    generation = job.generation
    assert generation.plan is not None
    ready = job.ready()
    more = try_plan(plan_for, len(job.members()) + len(ready), job.description)
    if not isinstance(more, Planned):
        return JoinVerdict(action=JoinAction.STAY, reason=f"ready newcomers stay out: {more.reason}")
    step_s = median(job.durations_s) if job.durations_s else (generation.step_s or 1.0)
    if more.step_s and generation.step_s:
        ratio = more.step_s / generation.step_s
    else:
        ratio = num_used(generation.plan) / num_used(more.plan)
    outlook = JoinOutlook(
        num_ready=len(ready),
        num_starting=len(job.with_status(WorkerStatus.STARTED)),
        step_s=step_s,
        step_with_s=step_s * ratio,
        morph_s=morph_cost_s(job.morph_costs_s),
        ready_since_s=ready[0].ready_s,
        arrivals_s=job.arrivals_s,
    )
    return decide_join(outlook, now_s)


def num_used(plan: Plan) -> int:
    """Workers that have a stage."""
    return sum(len(pipeline.stages) for pipeline in plan.pipelines)
