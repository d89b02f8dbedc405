"""Schedules and plans as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from varuna.spec import Plan, SectionSpec


def render_schedule(name: str, num_stages: int, num_micro_batches: int, recompute: Sequence[bool]) -> str:
    """A schedule in unit time, one row a stage."""
    raise NotImplementedError


def render_plan(plan: Plan, sections: Sequence[SectionSpec]) -> str:
    """Which worker holds what."""
    raise NotImplementedError
