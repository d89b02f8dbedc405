"""The nouns: small frozen values that cross package borders. Standard library only.

Read top to bottom: what a section is, how sections are laid out on workers (``Plan``), what a stage
does (``Task``), what one optimizer update reports (``Step``).

Counts are ``num_x``, indices ``x_index`` (from 0), durations ``_s``, sizes ``_bytes``, rates ``_per_s``.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from varuna.errors import PlanError

# --- sections -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class SectionSpec:
    """What lies between two neighbouring cut points, as numbers; the unit of placement.

    Attributes:
        index: position in the model, from 0.
        name: readable name of the first module in it, e.g. ``transformer.h.3``.
        parameter_names: the user's names (``model.named_parameters()``) of what it uses, tied ones included.
        parameter_bytes: bytes of those parameters.
        forward_flops: floating point operations of the forward pass for one sample; 0 if not countable.
        output_bytes: bytes live at the cut after it, for one sample; 0 after the last section.
    """

    index: int
    name: str
    parameter_names: tuple[str, ...]
    parameter_bytes: int
    forward_flops: float
    output_bytes: int


# --- the plan -------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class StageSpec:
    """A run of neighbouring sections held by one worker.

    Attributes:
        worker_index: the worker (one process, one device) that holds it.
        first_section, end_section: sections ``first_section <= i < end_section``.
        recompute: drop activations after forward and compute them again before backward.
        max_in_flight: how many micro-batches may be between forward and backward here at one time;
            0 means the schedule's own default.
    """

    worker_index: int
    first_section: int
    end_section: int
    recompute: bool = False
    max_in_flight: int = 0


@dataclass(frozen=True, kw_only=True)
class PipelineSpec:
    """Stages that together cover all sections (a data-parallel replica), and its share of micro-batches.

    Its micro-batches are the contiguous range ``first_micro_batch <= k < end_micro_batch`` of the global
    batch's; shares may differ between pipelines.
    """

    stages: tuple[StageSpec, ...]
    first_micro_batch: int
    end_micro_batch: int

    @property
    def num_micro_batches(self) -> int:
        """Micro-batches of one global batch that this pipeline runs."""
        return self.end_micro_batch - self.first_micro_batch


@dataclass(frozen=True, kw_only=True)
class StagePosition:
    """Where a worker stands in a plan."""

    pipeline_index: int
    stage_index: int


@dataclass(frozen=True, kw_only=True)
class Plan:
    """Which worker holds what and what it does: a value, made from scratch for every generation.

    Pipelines need not be alike: depths, borders and shares may differ. A worker in no pipeline is a spare.
    """

    pipelines: tuple[PipelineSpec, ...]
    num_workers: int
    num_sections: int
    batch_size: int
    micro_batch_size: int
    schedule: str

    def __post_init__(self) -> None:
        _validate(self)

    @property
    def num_micro_batches(self) -> int:
        """N: micro-batches of one global batch; the last may be short."""
        return -(-self.batch_size // self.micro_batch_size)

    def position_of(self, worker_index: int) -> StagePosition | None:
        """Pipeline and stage of a worker, or None for a spare."""
        for pipeline_index, pipeline in enumerate(self.pipelines):
            for stage_index, stage in enumerate(pipeline.stages):
                if stage.worker_index == worker_index:
                    return StagePosition(pipeline_index=pipeline_index, stage_index=stage_index)
        return None

    def stage_of(self, worker_index: int) -> StageSpec | None:
        """The stage a worker holds, or None for a spare."""
        position = self.position_of(worker_index)
        if position is None:
            return None
        return self.pipelines[position.pipeline_index].stages[position.stage_index]

    def holders_of(self, section_index: int) -> tuple[int, ...]:
        """Workers that hold a section, in pipeline order."""
        return tuple(
            stage.worker_index
            for pipeline in self.pipelines
            for stage in pipeline.stages
            if stage.first_section <= section_index < stage.end_section
        )

    def micro_batch_samples(self, micro_batch_index: int) -> range:
        """Positions in the global batch of micro-batch k: ``[k·m, (k+1)·m)``, the last may be short."""
        start = micro_batch_index * self.micro_batch_size
        return range(start, min(start + self.micro_batch_size, self.batch_size))


def _validate(plan: Plan) -> None:
    if plan.batch_size < 1 or plan.micro_batch_size < 1:
        raise PlanError(
            f"batch_size={plan.batch_size} and micro_batch_size={plan.micro_batch_size} must be at least 1."
        )
    if plan.micro_batch_size > plan.batch_size:
        raise PlanError(
            f"A micro-batch of {plan.micro_batch_size} samples is larger than the global batch of "
            f"{plan.batch_size}. Choose a micro-batch size of at most {plan.batch_size}."
        )
    if not plan.pipelines:
        raise PlanError("A plan needs at least one pipeline.")
    seen: set[int] = set()
    next_micro_batch = 0
    for pipeline in plan.pipelines:
        next_section = 0
        for stage in pipeline.stages:
            if stage.first_section != next_section or stage.end_section <= stage.first_section:
                raise PlanError(
                    f"Stages must cover sections 0..{plan.num_sections} in order and hold at least one each; "
                    f"found [{stage.first_section}, {stage.end_section}) where {next_section} comes next."
                )
            next_section = stage.end_section
            if stage.worker_index in seen or not 0 <= stage.worker_index < plan.num_workers:
                raise PlanError(
                    f"Worker {stage.worker_index} is used twice, or is none of the {plan.num_workers} workers."
                )
            seen.add(stage.worker_index)
        if next_section != plan.num_sections:
            raise PlanError(f"A pipeline covers {next_section} of the {plan.num_sections} sections.")
        if pipeline.first_micro_batch != next_micro_batch or pipeline.num_micro_batches < 1:
            raise PlanError(
                f"Pipelines must share the {plan.num_micro_batches} micro-batches in order, at least one each; "
                f"found [{pipeline.first_micro_batch}, {pipeline.end_micro_batch}) where {next_micro_batch} "
                f"comes next. Use fewer pipelines or a smaller micro-batch size."
            )
        next_micro_batch = pipeline.end_micro_batch
    if next_micro_batch != plan.num_micro_batches:
        raise PlanError(f"Pipelines cover {next_micro_batch} of {plan.num_micro_batches} micro-batches.")


# --- what a stage does ----------------------------------------------------------------------


class TaskKind(enum.Enum):
    """Kinds of work on one micro-batch; the value is the letter schedules print."""

    FORWARD = "F"
    RECOMPUTE = "R"
    BACKWARD = "B"
    WEIGHT = "W"
    """Gradients of weights, where a schedule splits them off: B is then the gradients of inputs only."""


@dataclass(frozen=True, slots=True)
class Task:
    """One piece of work of a stage. ``micro_batch_index`` counts within the pipeline, from 0."""

    kind: TaskKind
    micro_batch_index: int

    def __str__(self) -> str:
        return f"{self.kind.value}{self.micro_batch_index}"


# --- what a step reports --------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Step:
    """One optimizer update; the same numbers on every worker.

    Attributes:
        index: step number, from 0 over the life of the job.
        loss: loss sum over the global batch divided by its weight.
        weight: the global weight (samples, or what the model stated, e.g. tokens).
        num_samples: samples in the global batch.
        grad_norm: norm of the gradient of the whole model before clipping.
        lr: learning rate of the first param group used for this update.
        learning_rates: that of every param group.
        skipped: True if fp16 overflow made every worker skip the update.
        loss_scale: fp16 loss scale used (1.0 for other precisions).
        duration_s, samples_per_s: wall time of this step on this worker.
        tokens_per_s: elements of the largest integer input per second, None if the input has no tokens.
        memory_bytes: peak memory of this worker's process (CPU: resident set, CUDA: allocated).
    """

    index: int
    loss: float
    weight: float
    num_samples: int
    grad_norm: float
    lr: float
    learning_rates: tuple[float, ...]
    skipped: bool
    loss_scale: float
    duration_s: float
    samples_per_s: float
    tokens_per_s: float | None
    memory_bytes: int
