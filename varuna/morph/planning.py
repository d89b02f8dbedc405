"""The plan for so many workers, as the manager asks for it: from the job's profile if it has one."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable
from dataclasses import dataclass, replace

from varuna.errors import PlanError
from varuna.morph.messages import Described
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster, Machine
from varuna.plan.layout import simple_plan
from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class Planned:
    """A plan for a number of workers.

    Attributes:
        plan: worker i is any worker.
        step_s: predicted seconds of a step, None without a profile.
        micro_batch_s: predicted seconds of computing for a micro-batch, per pipeline and stage; empty without.
        note: what people should know about it: what of the user's wishes could not be kept.
    """

    plan: Plan
    step_s: float | None = None
    micro_batch_s: tuple[tuple[float, ...], ...] = ()
    note: str = ""


PlanFor = Callable[[int, Described], Planned]
"""Number of workers, and what the job is -> plan. Raises ``PlanError`` if it cannot go on with so many.

It must give the same answer whenever it is asked the same: the manager's journal is replayed with it.
"""


def plan_for(num_workers: int, described: Described) -> Planned:
    """The plan for so many workers, as fast as they come.

    A number of stages that the user fixed is given up if it is impossible with so few workers; nothing else is.

    Raises:
        PlanError: the job cannot go on with so many.
    """
    asked = described.num_stages
    if asked is None or asked <= num_workers:
        return _plan(num_workers, described, asked)
    fewer = _plan(num_workers, described, None)
    num_stages = max(len(pipeline.stages) for pipeline in fewer.plan.pipelines)
    present = "is 1 worker" if num_workers == 1 else f"are {num_workers} workers"
    note = f"{asked} stages were asked for, but there {present}: {num_stages} now"
    return replace(fewer, note="; ".join(filter(None, (fewer.note, note))))


def warm_up(described: Described) -> threading.Thread:
    """Choose a plan for nobody, in a thread of its own: what is compiled then, a death need not wait for."""

    def choose() -> None:
        with contextlib.suppress(PlanError):
            plan_for(1, described)

    thread = threading.Thread(target=choose, name="varuna-warm-up", daemon=True)
    thread.start()
    return thread


def _plan(num_workers: int, described: Described, num_stages: int | None) -> Planned:
    recompute = described.recompute
    if isinstance(recompute, tuple) and len(recompute) != num_stages:
        recompute = any(recompute)  # flags for stages that there are not any more
    profile = described.profile
    if profile is None:
        choice = simple_plan(
            sections=described.sections,
            num_workers=num_workers,
            batch_size=described.batch_size,
            num_stages=num_stages,
            micro_batch_size=described.micro_batch_size,
            schedule=described.schedule,
            recompute=recompute,
        )
        return Planned(plan=choice.plan)
    machines = tuple(Machine(name=f"machine-{index}", num_workers=1) for index in range(num_workers))
    choice = choose_plan(
        profile,
        Cluster(machines=machines),
        batch_size=described.batch_size,
        num_stages=num_stages,
        micro_batch_size=described.micro_batch_size,
        schedule=described.schedule,
        recompute=recompute,
    ).to_plan_choice()
    return Planned(plan=choice.plan, step_s=choice.step_s, micro_batch_s=choice.micro_batch_s)
