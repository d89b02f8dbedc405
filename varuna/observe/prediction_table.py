"""A prediction as text: the step in a line or two, then a row for each stage."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import replace

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from varuna.observe.text import human_count, human_seconds
from varuna.plan.costs import stage_costs
from varuna.plan.predict import PipelinePrediction, Prediction, StagePrediction
from varuna.plan.profile import Profile
from varuna.plan.render import format_bytes
from varuna.spec import Plan, StageSpec

_WIDTH = 140
_COLUMNS = ("pipelines", "micro-batches", "stage", "sections", "recompute", "busy", "reduce", "in flight")


def render_prediction(prediction: Prediction, plan: Plan, profile: Profile) -> str:
    """The step, and per stage: share of the step at work, exposed reduction, messages, memory.

    Pipelines with equal stages and memory share their rows; times are then those of the slowest of them.
    """
    used = sum(len(pipeline.stages) for pipeline in plan.pipelines)
    lines = [
        f"step {human_seconds(prediction.step_s)}, {human_count(prediction.samples_per_s)} samples/s, "
        f"bubble {prediction.bubble:.1%}, exposed reduction {human_seconds(prediction.reduce_s)}",
        f"{used} of {plan.num_workers} workers, schedule {plan.schedule}, "
        f"{plan.num_micro_batches} micro-batches of {plan.micro_batch_size}",
    ]
    if profile.estimated:
        lines.append("The profile is an estimate from data sheets: nothing was measured.")
    else:
        lines += profile.notes
    table = Table(*_COLUMNS, "sends forward", "sends backward", "memory", box=SIMPLE_HEAD, pad_edge=False)
    for indices in _alike(prediction, plan):
        slowest = max(indices, key=lambda index: _end_s(prediction.pipelines[index]))
        spec, predicted = plan.pipelines[slowest], prediction.pipelines[slowest]
        shares = sorted({plan.pipelines[index].num_micro_batches for index in indices})
        for index, (stage, result) in enumerate(zip(spec.stages, predicted.stages, strict=True)):
            head = (_ranges(indices), _ranges(shares)) if index == 0 else ("", "")
            table.add_row(*head, str(index), *_cells(stage, result, prediction.step_s, plan, profile))
    text = io.StringIO()
    Console(file=text, width=_WIDTH).print(table)
    return "\n".join([*lines, *(line.rstrip() for line in text.getvalue().splitlines())]) + "\n"


def _cells(
    spec: StageSpec, stage: StagePrediction, step_s: float, plan: Plan, profile: Profile
) -> tuple[str, ...]:
    costs = stage_costs(profile, spec.first_section, spec.end_section, plan.micro_batch_size)
    last = spec.end_section - 1
    limit = profile.device_memory_bytes
    return (
        str(last) if last == spec.first_section else f"{spec.first_section}-{last}",
        "yes" if spec.recompute else "no",
        f"{stage.busy_s / step_s:.0%}",
        human_seconds(stage.reduce_s),
        str(stage.peak_in_flight),
        format_bytes(costs.output_bytes) if costs.output_bytes else "-",
        format_bytes(costs.returned_bytes) if costs.returned_bytes else "-",
        f"{format_bytes(stage.peak_memory_bytes)} of {format_bytes(limit)}"
        + (" TOO MUCH" if limit and stage.peak_memory_bytes > limit else ""),
    )


def _alike(prediction: Prediction, plan: Plan) -> list[list[int]]:
    """Pipelines of equal stages and memory, by index."""
    groups: dict[object, list[int]] = {}
    for index, (spec, predicted) in enumerate(zip(plan.pipelines, prediction.pipelines, strict=True)):
        stages = tuple(replace(stage, worker_index=0) for stage in spec.stages)
        memory = tuple((stage.peak_in_flight, stage.peak_memory_bytes) for stage in predicted.stages)
        groups.setdefault((stages, memory), []).append(index)
    return list(groups.values())


def _end_s(pipeline: PipelinePrediction) -> float:
    return pipeline.makespan_s + max(stage.reduce_s for stage in pipeline.stages)


def _ranges(numbers: Sequence[int]) -> str:
    """``0-3, 5``: ascending numbers, neighbours joined."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and runs[-1][-1] == number - 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}" if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)
