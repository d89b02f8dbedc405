"""Why a generation that runs should end after its step: somebody leaves, or newcomers are worth it. Pure."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from varuna.morph.arrange import try_plan
from varuna.morph.decision import (
    HORIZON_S,
    JoinAction,
    JoinOutlook,
    JoinVerdict,
    decide_join,
    morph_cost_s,
)
from varuna.morph.planning import PlanFor, Planned
from varuna.morph.record import JobRecord, WorkerStatus
from varuna.morph.slowness import relative_step_s, share_out
from varuna.spec import Plan

MIN_SHARE_GAIN = 0.05
"""Share of a step that sharing micro-batches anew must save."""


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
    kept = [member.incarnation for member in members if member.incarnation in job.generation.givers]
    if kept:
        return Wish(reason=f"asked to leave, and not any more: {', '.join(kept)}", pause=True)
    slow = _slow(job, plan_for, now_s)
    if slow.pause or not ready:
        return slow
    verdict = _join(job, plan_for, now_s)
    again_s = [until_s for until_s in (slow.until_s, verdict.until_s) if until_s is not None]
    return Wish(
        reason=verdict.reason,
        pause=verdict.action is JoinAction.MORPH,
        until_s=min(again_s, default=None),
    )


def _slow(job: JobRecord, plan_for: PlanFor, now_s: float) -> Wish:
    """Whether slow workers should get less, or none, or another try."""
    assert job.description is not None
    assert job.generation.plan is not None
    plan, members = job.generation.plan, job.members()
    ranks = {name: rank for rank, name in enumerate(job.generation.members)}
    resting = [member for member in members if member.rests_until_s is not None]
    for member in resting:
        assert member.rests_until_s is not None
        has_work = plan.stage_of(ranks[member.incarnation]) is not None
        if member.rests_until_s <= now_s and not has_work:
            return Wish(reason=f"{member.incarnation} was slow and is given another try", pause=True)
        if member.rests_until_s > now_s and has_work:
            without = try_plan(plan_for, len(members) - len(resting), job.description)
            if isinstance(without, Planned):
                text = f"{member.incarnation}, at {member.speed:.0%} of its peers' speed, is left out"
                return Wish(reason=text, pause=True)
    speeds = {ranks[member.incarnation]: member.speed for member in members}
    now, better = (relative_step_s(one, speeds) for one in (plan, share_out(plan, speeds)))
    gain = 1.0 - better / now
    if gain >= MIN_SHARE_GAIN and gain * HORIZON_S > morph_cost_s(job.morph_costs_s):
        slow = ", ".join(f"{one.incarnation} at {one.speed:.0%}" for one in members if one.speed < 1.0)
        text = f"micro-batches are shared anew, a step would be {gain:.0%} shorter: {slow or 'all are as fast'}"
        return Wish(reason=text, pause=True)
    waits_s = [member.rests_until_s for member in resting if (member.rests_until_s or 0.0) > now_s]
    return Wish(until_s=min(filter(None, waits_s), default=None))


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
