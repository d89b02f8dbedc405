"""The plan until a profile exists: sections balanced over stages, micro-batches shared evenly.

What the caller fixes is kept or refused with a ``PlanError``; the rest is chosen, and the choice comes with its
reason.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from varuna.errors import PlanError
from varuna.plan.balance import balance
from varuna.plan.render import format_bytes
from varuna.plan.schedule import check_schedule_name
from varuna.spec import PipelineSpec, Plan, SectionSpec, StageSpec

COPIES = 4
"""Weights, gradients and two moments of Adam: what a parameter takes, in copies of itself."""

MICRO_BATCHES_PER_STAGE = 4
"""With 4·P micro-batches the first and last of a step leave each stage idle for at most a fifth of it."""


@dataclass(frozen=True, kw_only=True)
class PlanChoice:
    """A plan and, in words, why it looks so.

    Attributes:
        plan: the layout.
        reason: for people.
        step_s: predicted seconds of a step; None without a profile.
        micro_batch_s: predicted seconds of computing for a micro-batch, per pipeline and stage; empty without.
    """

    plan: Plan
    reason: str
    step_s: float | None = None
    micro_batch_s: tuple[tuple[float, ...], ...] = ()


@dataclass(frozen=True, kw_only=True)
class _Stages:
    """Borders of the stages of every pipeline, and why so many."""

    borders: tuple[int, ...]
    reason: str

    @property
    def num_stages(self) -> int:
        return len(self.borders) - 1


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
    """P equal stages by forward operations, as many pipelines as the workers allow, even shares.

    Worker ``pipeline_index · P + stage_index`` holds a stage; workers that are left over are spares, as they
    are when there are fewer micro-batches than pipelines.

    Args:
        sections: all sections of the model, in order.
        num_workers: workers present.
        batch_size: samples of a global batch.
        num_stages: P. Default: 1, or with ``memory_bytes`` the fewest stages whose weights, gradients and two
            optimizer moments fit each worker (activations are not counted).
        micro_batch_size: m. Default: the largest power of two that leaves every pipeline 4·P micro-batches,
            or 1.
        schedule: one of ``SCHEDULES``; default ``varuna``.
        recompute: for all stages, or one flag for each; default no.
        memory_bytes: memory of each worker, if known.

    Raises:
        PlanError: what was asked for cannot be laid out; the message has the values and a way out.
    """
    _check(sections, num_workers, batch_size, micro_batch_size)
    name = "varuna" if schedule is None else schedule
    check_schedule_name(name)
    stages = _choose_stages(sections, num_workers, num_stages, memory_bytes)
    flags = _recompute_flags(recompute, stages.num_stages)
    if name != "gpipe":  # each backward follows its forward on the last stage: nothing is saved by recompute
        flags = (*flags[:-1], False)
    num_pipelines = num_workers // stages.num_stages
    size, size_reason = _choose_micro_batch_size(batch_size, stages.num_stages, num_pipelines, micro_batch_size)
    num_micro_batches = -(-batch_size // size)
    reasons = [stages.reason, size_reason]
    if num_micro_batches < num_pipelines:
        reasons.append(
            f"{num_micro_batches} of {num_pipelines} possible pipelines, one for each micro-batch: smaller "
            f"micro-batches or a larger batch would use the spare workers"
        )
        num_pipelines = num_micro_batches
    plan = Plan(
        pipelines=_pipelines(stages.borders, flags, num_pipelines, num_micro_batches),
        num_workers=num_workers,
        num_sections=len(sections),
        batch_size=batch_size,
        micro_batch_size=size,
        schedule=name,
    )
    return PlanChoice(plan=plan, reason="; ".join(reasons) + ".")


def _check(
    sections: Sequence[SectionSpec], num_workers: int, batch_size: int, micro_batch_size: int | None
) -> None:
    if not sections:
        raise PlanError("The model has no sections to lay out.")
    if num_workers < 1 or batch_size < 1:
        raise PlanError(f"num_workers={num_workers} and batch_size={batch_size} must both be at least 1.")
    if micro_batch_size is not None:
        check_micro_batch_size(micro_batch_size, batch_size)


def check_micro_batch_size(micro_batch_size: int, batch_size: int) -> None:
    """Raise ``PlanError`` if a global batch cannot be cut so."""
    if not 1 <= micro_batch_size <= batch_size:
        raise PlanError(
            f"A global batch of {batch_size} samples cannot be cut into micro-batches of {micro_batch_size}. "
            f"Choose a micro-batch size from 1 to {batch_size}, or a larger batch size."
        )


def _choose_stages(
    sections: Sequence[SectionSpec], num_workers: int, num_stages: int | None, memory_bytes: int | None
) -> _Stages:
    sizes = [float(COPIES * section.parameter_bytes) for section in sections]
    costs = [section.forward_flops for section in sections]
    if not any(costs):
        costs = sizes if any(sizes) else [1.0] * len(sections)
    if num_stages is not None:
        _check_num_stages(num_stages, len(sections), num_workers)
        borders = None
        if memory_bytes is not None:
            borders = balance(costs, num_stages, sizes=sizes, size_limit=memory_bytes)
        borders = borders or balance(costs, num_stages)
        assert borders is not None
        return _Stages(
            borders=borders, reason=f"{num_stages} {'stage' if num_stages == 1 else 'stages'} as asked for"
        )
    if memory_bytes is None:
        return _Stages(borders=(0, len(sections)), reason="1 stage, since no memory limit is known")
    most_stages = min(len(sections), num_workers)
    needs = f"weights, gradients and optimizer state take {format_bytes(sum(sizes))}"
    for count in range(1, most_stages + 1):
        borders = balance(costs, count, sizes=sizes, size_limit=memory_bytes)
        if borders is not None:
            return _Stages(
                borders=borders,
                reason=f"{'1 stage is' if count == 1 else f'{count} stages are'} the fewest that fit: {needs}, "
                f"a worker has {format_bytes(memory_bytes)}",
            )
    borders = balance(sizes, most_stages)
    assert borders is not None
    return _Stages(
        borders=borders,
        reason=f"{most_stages} stages of equal size, as many as sections and workers allow, may not fit: "
        f"{needs}, a worker has {format_bytes(memory_bytes)}",
    )


def _check_num_stages(num_stages: int, num_sections: int, num_workers: int) -> None:
    if num_stages < 1:
        raise PlanError(f"num_stages={num_stages} must be at least 1.")
    if num_stages > num_sections:
        raise PlanError(
            f"{num_stages} stages need at least {num_stages} sections, but the model has {num_sections}. "
            f"Ask for at most {num_sections} stages, or mark more cut points."
        )
    if num_stages > num_workers:
        raise PlanError(
            f"{num_stages} stages need at least {num_stages} workers, but there are {num_workers}. "
            f"Ask for at most {num_workers} stages, or start more workers."
        )


def _recompute_flags(recompute: bool | Sequence[bool] | None, num_stages: int) -> tuple[bool, ...]:
    if recompute is None or isinstance(recompute, bool):
        return (bool(recompute),) * num_stages
    if len(recompute) != num_stages:
        raise PlanError(
            f"recompute={list(recompute)} has {len(recompute)} entries for {num_stages} stages. Give one flag "
            f"for each stage, or True or False for all."
        )
    return tuple(bool(flag) for flag in recompute)


def _choose_micro_batch_size(
    batch_size: int, num_stages: int, num_pipelines: int, asked: int | None
) -> tuple[int, str]:
    if asked is not None:
        return asked, f"micro-batches of {asked} as asked for"
    wanted = MICRO_BATCHES_PER_STAGE * num_stages
    size = 1
    while -(-batch_size // (2 * size)) // num_pipelines >= wanted:
        size *= 2
    if -(-batch_size // size) // num_pipelines >= wanted:
        why = f"the largest power of two that leaves each pipeline {wanted} or more"
    else:
        why = f"the smallest there is, since the batch does not give each pipeline {wanted}"
    return size, f"micro-batches of {size}, {why}"


def _pipelines(
    borders: tuple[int, ...], flags: tuple[bool, ...], num_pipelines: int, num_micro_batches: int
) -> tuple[PipelineSpec, ...]:
    """Like pipelines with contiguous shares; the first ones take one more where N does not divide evenly."""
    num_stages = len(flags)
    least, num_larger = divmod(num_micro_batches, num_pipelines)
    pipelines = []
    first = 0
    for pipeline_index in range(num_pipelines):
        end = first + least + (pipeline_index < num_larger)
        stages = tuple(
            StageSpec(
                worker_index=pipeline_index * num_stages + stage_index,
                first_section=borders[stage_index],
                end_section=borders[stage_index + 1],
                recompute=flags[stage_index],
            )
            for stage_index in range(num_stages)
        )
        pipelines.append(PipelineSpec(stages=stages, first_micro_batch=first, end_micro_batch=end))
        first = end
    return tuple(pipelines)
