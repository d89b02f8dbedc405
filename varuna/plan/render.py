"""Schedules and plans as text for people."""

from __future__ import annotations

from collections.abc import Sequence

from varuna.plan.schedule import pipeline_schedules
from varuna.plan.simulate import StageTimes, TaskSpan, constant_durations, simulate_step
from varuna.spec import PipelineSpec, Plan, SectionSpec, StageSpec

UNIT_TIMES = StageTimes(forward_s=1, recompute_s=1, backward_s=2, weight_s=1)


def render_schedule(
    name: str,
    num_stages: int,
    num_micro_batches: int,
    recompute: Sequence[bool] | bool = False,
    *,
    max_in_flight: int = 0,
) -> str:
    """What each stage does when F and R take one unit of time, B two, and messages none; one row a stage.

    Where backward is split, B and W take one unit each.

    Args:
        name: one of ``SCHEDULES``.
        num_stages: P.
        num_micro_batches: N of one pipeline.
        recompute: for all stages, or one for each.
        max_in_flight: limit for every stage; 0 is the schedule's own.

    Raises:
        PlanError: as ``stage_schedule``.
    """
    flags = [recompute] * num_stages if isinstance(recompute, bool) else list(recompute)
    schedules = pipeline_schedules(
        name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        recompute=flags,
        max_in_flight=max_in_flight,
    )
    simulation = simulate_step(
        schedules, duration_s=constant_durations([UNIT_TIMES] * num_stages, split=schedules[0].split)
    )
    width = len(str(num_micro_batches - 1)) + 1
    num_slots = round(simulation.makespan_s)
    counts = f"{_count('stage', num_stages)}, {_count('micro-batch', num_micro_batches)}"
    lines = [f"{name}: {counts}, {num_slots} units of time"]
    for index, timeline in enumerate(simulation.timelines):
        peak = str(simulation.peak_in_flight[index])
        label = f"stage {index:<{len(str(num_stages - 1))}}  in flight {peak:<{width}}"
        lines.append(f"{label}| {_row(timeline, num_slots, width)}".rstrip())
    return "\n".join(lines) + "\n"


def _row(timeline: Sequence[TaskSpan], num_slots: int, width: int) -> str:
    """A slot for each unit of time: the task in its first one, ``==`` while it goes on, ``.`` for idle."""
    slots = [".".ljust(width)] * num_slots
    for span in timeline:
        start, end = round(span.start_s), round(span.end_s)
        slots[start:end] = [str(span.task).ljust(width), *["=" * width] * (end - start - 1)]
    return " ".join(slots)


def render_plan(plan: Plan, sections: Sequence[SectionSpec]) -> str:
    """Which worker holds which sections, each pipeline's share, and the numbers of the step, as a table."""
    total_flops = sum(section.forward_flops for section in sections)
    rows = [("pipeline", "micro-batches", "stage", "worker", "sections", "parameters", "work", "recompute")]
    for pipeline_index, pipeline in enumerate(plan.pipelines):
        for stage_index, stage in enumerate(pipeline.stages):
            held = sections[stage.first_section : stage.end_section]
            flops = sum(section.forward_flops for section in held)
            rows.append(
                (
                    str(pipeline_index) if stage_index == 0 else "",
                    _share(pipeline) if stage_index == 0 else "",
                    str(stage_index),
                    str(stage.worker_index),
                    _held(stage, held),
                    format_bytes(sum(section.parameter_bytes for section in held)),
                    f"{flops / total_flops:.0%}" if total_flops else "",
                    "yes" if stage.recompute else "no",
                )
            )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    table = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(line.rstrip() for line in [*_head(plan), *table]) + "\n"


def _head(plan: Plan) -> list[str]:
    used = {stage.worker_index for pipeline in plan.pipelines for stage in pipeline.stages}
    spares = [str(worker) for worker in range(plan.num_workers) if worker not in used]
    num_last = len(plan.micro_batch_samples(plan.num_micro_batches - 1))
    short = "" if num_last == plan.micro_batch_size else f" (the last of {num_last})"
    lines = [
        f"{_count('pipeline', len(plan.pipelines))} on {len(used)} of {_count('worker', plan.num_workers)}, "
        f"schedule {plan.schedule}",
        f"global batch of {_count('sample', plan.batch_size)} = "
        f"{_count('micro-batch', plan.num_micro_batches)} of {plan.micro_batch_size}{short}",
    ]
    if spares:
        lines.append(f"spare {'worker' if len(spares) == 1 else 'workers'}: {', '.join(spares)}")
    return lines


def _share(pipeline: PipelineSpec) -> str:
    first, last = pipeline.first_micro_batch, pipeline.end_micro_batch - 1
    return f"{first}" if first == last else f"{first}-{last} ({pipeline.num_micro_batches})"


def _held(stage: StageSpec, held: Sequence[SectionSpec]) -> str:
    first, last = stage.first_section, stage.end_section - 1
    if first == last:
        return f"{first}: {held[0].name}"
    return f"{first}-{last}: {held[0].name} .. {held[-1].name}"


def _count(noun: str, count: int) -> str:
    if count != 1:
        noun += "es" if noun.endswith("ch") else "s"
    return f"{count} {noun}"


def format_bytes(num_bytes: float) -> str:
    """``1.5 MB``: decimal units, three digits at most."""
    for unit in ("B", "kB", "MB", "GB"):
        if num_bytes < 1000:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1000
    return f"{num_bytes:.3g} TB"
