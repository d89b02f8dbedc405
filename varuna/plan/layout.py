"""The plan until a profile exists: sections balanced over stages, micro-batches shared evenly."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.spec import Plan, SectionSpec


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A plan and, in words, why it looks so."""

    plan: Plan
    reason: str


def simple_plan(
    *,
    sections: Sequence[SectionSpec],
    num_workers: int,
    batch_size: int,
    num_stages: int | None = None,
    micro_batch_size: int | None = None,
    schedule: str | None = None,
    recompute: bool | Sequence[bool] | None = None,
    memory_bytes: int | None = None,
) -> PlanChoice:
    """See module."""
    raise NotImplementedError
