"""What is asked for of a plan, and what the user fixed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.errors import PlanError
from varuna.plan.borders import SPLIT
from varuna.plan.cluster import Cluster
from varuna.plan.profile import Profile
from varuna.plan.schedule import SCHEDULES, check_schedule_name


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for; None where the user left it open.

    Attributes:
        batch_size: samples of a global batch.
        num_stages, micro_batch_size: P and m.
        schedules: those to choose from.
        recompute: for all stages, or one flag for each.
    """

    batch_size: int
    num_stages: int | None = None
    micro_batch_size: int | None = None
    schedules: tuple[str, ...] = SCHEDULES
    recompute: bool | tuple[bool, ...] | None = None

    def schedules_of(self, *, split: bool) -> tuple[str, ...]:
        """Those with or without a split backward."""
        return tuple(name for name in self.schedules if (name in SPLIT) == split)


def check_wish(
    profile: Profile,
    cluster: Cluster,
    *,
    batch_size: int,
    num_stages: int | None,
    micro_batch_size: int | None,
    schedule: str | None,
    recompute: bool | Sequence[bool] | None,
) -> Wish:
    """What ``choose_plan`` was given, if it can be laid out at all.

    Raises:
        PlanError: it cannot, memory apart.
    """
    num_sections, num_workers = len(profile.sections), cluster.num_workers
    if not num_sections or num_workers < 1 or batch_size < 1:
        raise PlanError(
            f"Nothing to plan: {num_sections} sections, {num_workers} workers, batch size {batch_size}. Each "
            f"must be at least 1."
        )
    if schedule is not None:
        check_schedule_name(schedule)
    if recompute is not None and not isinstance(recompute, bool):
        recompute = tuple(bool(flag) for flag in recompute)
        if num_stages is not None and len(recompute) != num_stages:
            raise PlanError(
                f"recompute has {len(recompute)} flags for {num_stages} stages. Give one for each stage, or "
                f"one for all."
            )
        num_stages = len(recompute)
    most = min(num_sections, num_workers)
    if num_stages is not None and not 1 <= num_stages <= most:
        few = "cut points in the model" if num_sections <= num_workers else "workers"
        raise PlanError(
            f"{num_stages} stages cannot be laid out: there are {num_sections} sections and {num_workers} "
            f"workers, and each stage needs one of both. Ask for 1 to {most} stages, or have more {few}."
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
