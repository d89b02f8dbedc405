"""What the user asked for, checked; and when nothing fits: why, and what would help."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

from varuna.errors import PlanError
from varuna.plan.cluster import Cluster
from varuna.plan.profile import Profile
from varuna.plan.render import format_bytes
from varuna.plan.schedule import SCHEDULES, check_schedule_name
from varuna.plan.search import Search
from varuna.plan.space import Wish


def check_wish(
    profile: Profile,
    cluster: Cluster,
    batch_size: int,
    num_stages: int | None,
    micro_batch_size: int | None,
    schedule: str | None,
    recompute: bool | Sequence[bool] | None,
) -> Wish:
    """What is asked for; arguments as ``choose_plan``'s.

    Raises:
        PlanError: it can be laid out on no machines, or not on these.
    """
    num_sections, num_workers = len(profile.sections), cluster.num_workers
    if not num_sections or num_workers < 1 or batch_size < 1:
        raise PlanError(
            f"Nothing to plan: {num_sections} sections, {num_workers} workers, batch size {batch_size}. Each must "
            f"be at least 1."
        )
    if schedule is not None:
        check_schedule_name(schedule)
    if recompute is not None and not isinstance(recompute, bool):
        recompute = tuple(bool(flag) for flag in recompute)
        if num_stages is not None and len(recompute) != num_stages:
            raise PlanError(
                f"recompute has {len(recompute)} flags for {num_stages} stages. Give one for each stage, or one "
                f"for all."
            )
        num_stages = len(recompute)
    if num_stages is not None and not 1 <= num_stages <= min(num_sections, num_workers):
        limit = "sections" if num_sections <= num_workers else "workers"
        raise PlanError(
            f"{num_stages} stages cannot be laid out: there are {num_sections} sections and {num_workers} "
            f"workers, and each stage needs one of both. Ask for 1 to {min(num_sections, num_workers)} stages, or "
            f"have more {limit}."
        )
    if micro_batch_size is not None and not 1 <= micro_batch_size <= batch_size:
        raise PlanError(
            f"A global batch of {batch_size} samples cannot be cut into micro-batches of {micro_batch_size}. "
            f"Choose a micro-batch size from 1 to {batch_size}, or a larger batch size."
        )
    return Wish(
        batch_size=batch_size,
        num_stages=num_stages,
        micro_batch_size=micro_batch_size,
        schedules=SCHEDULES if schedule is None else (schedule,),
        recompute=recompute,
    )


def refuse(
    search: Search, profile: Profile, cluster: Cluster, wish: Wish, is_possible: Callable[[Wish], bool]
) -> str:
    """Why nothing fits, with the tightest stage of the layout that needs least, and what would help."""
    tightest = search.evaluator.least_memory(search.space)
    over = tightest.needed_bytes - tightest.limit_bytes
    what = (
        f"No plan fits the memory of the {cluster.num_workers} workers: the one that needs least, {tightest.point.num_stages} "
        f"stages with micro-batches of {tightest.point.micro_batch_size}, needs {format_bytes(tightest.needed_bytes)} "
        f"for stage {tightest.stage_index} (sections {tightest.first_section} to {tightest.end_section - 1}), "
        f"{format_bytes(over)} more than a device has ({format_bytes(tightest.limit_bytes)})."
    )
    freed = [
        (wish.micro_batch_size is not None, replace(wish, micro_batch_size=None), "another micro-batch size"),
        (wish.recompute is not None, replace(wish, recompute=None), "recompute where memory needs it"),
        (wish.num_stages is not None, replace(wish, num_stages=None), "another number of stages"),
        (len(wish.schedules) < len(SCHEDULES), replace(wish, schedules=SCHEDULES), "another schedule"),
    ]
    helps = [text for was_fixed, other, text in freed if was_fixed and is_possible(other)]
    if helps:
        return f"{what} It would fit with {' or '.join(helps)}."
    sections = len(profile.sections)
    if tightest.point.num_stages < sections:
        return (
            f"{what} More workers would help (up to {sections} stages can share the {sections} sections), or "
            f"devices with more memory."
        )
    return f"{what} Devices with more memory would help, or more cut points in the model, since each stage holds one section."
