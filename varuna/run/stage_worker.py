"""One worker in a pipeline: data in, engine run, gradients and buffers reduced, numbers for the commit."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from varuna.errors import LossError
from varuna.generations import SampleShare, StepWork
from varuna.order import digest_of
from varuna.partition import InputSignature
from varuna.partition.signature import signature_of_flat
from varuna.plan import stage_schedule
from varuna.plan.spans import REDUCE
from varuna.run.buffers import BufferSync
from varuna.run.busy import BusyTime
from varuna.run.channel import StageChannels
from varuna.run.commit import CommitPart
from varuna.run.data import EvaluationLoader, MicroBatch, MicroBatchLoader
from varuna.run.engine import StepContext, run_forward_only, run_stage
from varuna.run.fetch import MapDataset
from varuna.run.groups import World
from varuna.run.job import JobSpec
from varuna.run.partitions import Partitions
from varuna.run.reduce import GradientReducer
from varuna.run.stage import LossTotals, ModelStage, StageInputs
from varuna.run.stage_sections import StageSections
from varuna.spec import Plan, StagePosition, StageSpec


class StageWorker:
    """One stage of one pipeline at work: what a worker that is no spare does in a generation.

    Args:
        index: number of the generation.
        world: this worker.
        plan: the layout.
        position: where this worker is in it.
        job: what the user asked for.
        partitions: the model's sections.
        channels: to the neighbours; None for a pipeline of one stage.
        reducer: sums gradients over holders.
        buffers: joins buffers that forward changes.
        first_step: step whose data comes first.
    """

    def __init__(
        self,
        *,
        index: int,
        world: World,
        plan: Plan,
        job: JobSpec,
        partitions: Partitions,
        position: StagePosition,
        reducer: GradientReducer,
        buffers: BufferSync,
        channels: StageChannels | None,
        first_step: int,
    ) -> None:
        pipeline = plan.pipelines[position.pipeline_index]
        self._channels = channels
        self._index = index
        self._world = world
        self._job = job
        self._plan = plan
        self._partitions = partitions
        self._position = position
        self._pipeline = pipeline
        self._device = world.device
        self._spec: StageSpec = pipeline.stages[position.stage_index]
        self._reducer = reducer
        self._schedule = stage_schedule(
            plan.schedule,
            num_stages=len(pipeline.stages),
            stage_index=position.stage_index,
            num_micro_batches=pipeline.num_micro_batches,
            recompute=[stage.recompute for stage in pipeline.stages],
            max_in_flight=self._spec.max_in_flight,
        )
        self._step_index = first_step
        self._busy = BusyTime(world.device)
        self._read: list[int] = []  # ids of the samples of the step under way
        # Other graphs than the first, in another mode or of another shape, may need data where that did not.
        # From then on all of it is read.
        self._reads = self._reads_at_first()
        self.loader = MicroBatchLoader(
            job.dataset,
            job.collate_fn,
            seed=job.seed,
            batch_size=job.batch_size,
            micro_batch_size=plan.micro_batch_size,
            micro_batch_range=range(pipeline.first_micro_batch, pipeline.end_micro_batch),
            first_step=first_step,
            num_data_workers=job.num_data_workers,
            device=self._device,
        )
        self._stage = self._make_stage(training=True, load=_weakly(self._load))
        self.buffers = buffers

    def start_loading(self) -> None:
        """Begin to load the first step's data, if this stage reads any."""
        if self._reads:
            self.loader.start()

    def run_step(self, step_index: int, gradient_scale: float) -> CommitPart:
        """This stage's share of a step, gradients and buffers reduced."""
        self._step_index = step_index
        self._stage.begin_step(step_index, gradient_scale)
        self._busy.reset()
        self._read = []
        self.buffers.begin()
        self._reducer.begin_step()
        spans = self._job.spans
        trace = run_stage(
            self._stage,
            self._schedule,
            self._channels,
            context=self._context(step_index, "train", self._pipeline.first_micro_batch),
            record_trace=spans.is_recording,
            busy=self._busy,
        )
        spans.add_tasks(trace)
        self._job.at("reduce")
        with spans.span(REDUCE):
            self._reducer.finish()
            self.buffers.combine()
        totals = self._stage.totals()
        share = range(self._pipeline.first_micro_batch, self._pipeline.end_micro_batch)
        return CommitPart(
            generation=self._index,
            step_index=step_index,
            loss_sum=totals.loss_sum,
            weight=totals.weight,
            num_samples=sum(len(self._plan.micro_batch_samples(k)) for k in share) if self._is_last else 0,
            squared_norm=self._reducer.squared_norm(),
            non_finite_micro_batch=totals.first_non_finite,
        )

    def work(self) -> StepWork:
        """What was done here in the last step; each pipeline's first stage tells which samples it has read."""
        samples = None
        if self._position.stage_index == 0:
            first = self._pipeline.first_micro_batch * self._plan.micro_batch_size
            samples = SampleShare(first=first, end=first + len(self._read), digest=digest_of(self._read))
        return StepWork(busy_s=self._busy.seconds(), samples=samples)

    def undo_step(self) -> None:
        """Drop the graphs, messages and gradients of a broken step; buffers as before it."""
        self._stage.begin_step(self._step_index)
        self._reducer.cancel()
        self.buffers.restore()

    def evaluate(
        self, dataset: MapDataset, micro_batch_size: int, evaluation_index: int
    ) -> tuple[LossTotals, int]:
        """This stage's share of an evaluation; sums and samples are counted on the last stage."""
        loader = EvaluationLoader(
            dataset,
            self._job.collate_fn,
            seed=self._job.seed,
            micro_batch_size=micro_batch_size,
            num_pipelines=len(self._plan.pipelines),
            pipeline_index=self._position.pipeline_index,
            num_data_workers=self._job.num_data_workers,
            device=self._device,
        )
        num_samples = len(dataset)

        reads = self._reads

        def load(k: int, is_needed: bool) -> StageInputs:
            nonlocal reads
            reads = reads or is_needed
            if reads:
                return self._inputs(loader.get(k))
            count = min(micro_batch_size, num_samples - k * micro_batch_size)
            return StageInputs(signature=None, tensors={}, num_samples=count)

        stage = self._make_stage(training=False, load=load)
        stage.begin_step(evaluation_index)
        share = loader.micro_batches
        try:
            run_forward_only(
                stage,
                self._channels,
                context=self._context(evaluation_index, "evaluate", share.start),
                num_stages=len(self._pipeline.stages),
                stage_index=self._position.stage_index,
                num_micro_batches=len(share),
            )
        finally:
            loader.close()
        first = share.start * micro_batch_size
        end = min(share.stop * micro_batch_size, num_samples)
        return stage.totals(), max(0, end - first) if self._is_last else 0

    @property
    def _is_last(self) -> bool:
        return self._position.stage_index == len(self._pipeline.stages) - 1

    def _context(self, step_index: int, operation: str, first_micro_batch: int) -> StepContext:
        return StepContext(
            generation=self._index,
            step_index=step_index,
            operation=operation,
            first_micro_batch=first_micro_batch,
            rank=self._world.rank,
            pipeline_index=self._position.pipeline_index,
            stage_index=self._position.stage_index,
        )

    def _make_stage(self, *, training: bool, load: Callable[[int, bool], StageInputs]) -> ModelStage:
        partitions = self._partitions

        def partition_for(signature: InputSignature | None, num_samples: int) -> Any:
            return partitions.get(signature, num_samples, training=training)

        return ModelStage(
            sections=StageSections(
                self._spec.first_section,
                self._spec.end_section,
                partition_for,
                split=training and self._schedule.split,
                training=training,
            ),
            load=load,
            is_first=self._position.stage_index == 0,
            is_last=self._is_last,
            training=training,
            autocast=self._job.autocast,
            seed=self._job.seed,
            device=self._device,
            before_final_backward=_weakly(self._begin_final_backward) if training else None,
        )

    def _begin_final_backward(self, additions: Mapping[nn.Parameter, int] | None = None) -> None:
        self._job.at("final backward")
        self._reducer.begin_final_backward(additions)

    def _reads_at_first(self) -> bool:
        """Whether any section here needs the batch itself, or the loss weight is computed from it."""
        if self._is_last and self._job.loss_weight is not None:
            return True
        sections = self._partitions.reference.sections[self._spec.first_section : self._spec.end_section]
        return self._position.stage_index == 0 or any(section.input_keys for section in sections)

    def _load(self, micro_batch_index: int, is_needed: bool) -> StageInputs:
        self._job.at("forward")
        self._reads = self._reads or is_needed
        if not self._reads:
            count = len(self._plan.micro_batch_samples(micro_batch_index))
            return StageInputs(signature=None, tensors={}, num_samples=count)
        micro_batch = self.loader.get(self._step_index, micro_batch_index)
        self._read += micro_batch.sample_ids
        return self._inputs(micro_batch)

    def _inputs(self, micro_batch: MicroBatch) -> StageInputs:
        signature = signature_of_flat(micro_batch.flat, micro_batch.num_samples)
        weight = None
        if self._is_last and self._job.loss_weight is not None:
            weight = _number(self._job.loss_weight(micro_batch.batch))
        return StageInputs(
            signature=None if signature == self._partitions.signature else signature,
            tensors={
                key: tensor.to(self._device, non_blocking=True)
                for key, tensor in micro_batch.flat.tensors.items()
            },
            num_samples=micro_batch.num_samples,
            weight=weight,
        )


def _weakly(method: Callable[..., Any]) -> Callable[..., Any]:
    """The same for as long as its object lives, without keeping it.

    A stage worker has its stage: did the stage have it in turn, both would stay after their generation until
    the garbage collector came, and with them sockets and threads of groups and store.
    """
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> Any:
        alive = reference()
        assert alive is not None, "a stage without its worker"
        return alive(*arguments)

    return call


def _number(weight: object) -> float:
    """The value of ``loss_weight``. Raises LossError if it is no number."""
    if isinstance(weight, (int, float)) or (isinstance(weight, torch.Tensor) and weight.numel() == 1):
        return float(weight)
    found = f"a tensor of shape {tuple(weight.shape)}" if isinstance(weight, torch.Tensor) else repr(weight)
    raise LossError(
        f"loss_weight returned {found}; it must return a number, or a tensor with one element: how much the "
        f"batch's mean loss counts, e.g. its number of valid tokens."
    )
