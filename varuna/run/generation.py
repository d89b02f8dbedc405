"""Everything that belongs to one membership and one plan: groups, channels, stage, reducer, loader.

A generation is opened, runs steps and evaluations, and is closed, all in the same process; the next one starts
from a new plan. What outlives it (model, optimizer, loss scale, step number) is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from varuna.partition import InputSignature
from varuna.partition.signature import signature_of_flat
from varuna.plan import stage_schedule
from varuna.run.buffers import BufferSync
from varuna.run.channel import StageChannels, open_channels
from varuna.run.commit import CommitPart, Committed, commit
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.data import EvaluationLoader, MicroBatch, MicroBatchLoader
from varuna.run.engine import StepContext, run_forward_only, run_stage
from varuna.run.fetch import CollateFn, MapDataset
from varuna.run.groups import Groups, World
from varuna.run.partitions import Partitions
from varuna.run.precision import AutocastSpec
from varuna.run.reduce import GradientReducer
from varuna.run.stage import LossTotals, ModelStage, StageInputs, StageSections
from varuna.spec import PipelineSpec, Plan, StagePosition, StageSpec

LossWeight = Callable[[Any], float | torch.Tensor]
"""The user's ``loss_weight``: a collated batch to the weight of its loss."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user asked for that every generation needs.

    Attributes:
        dataset, collate_fn, num_data_workers: how samples become batches.
        batch_size: samples in a global batch.
        seed: of data order and random numbers.
        autocast: precision of forward.
        loss_weight: weight of a batch's loss; None leaves it to what forward returns.
        token: secret of the job, for connections between workers.
    """

    dataset: MapDataset
    collate_fn: CollateFn | None
    num_data_workers: int | None
    batch_size: int
    seed: int
    autocast: AutocastSpec
    loss_weight: LossWeight | None
    token: bytes


@dataclass(frozen=True, kw_only=True)
class EvaluationSums:
    """Sums over one evaluation, the same on every worker."""

    loss_sum: float
    weight: float
    num_samples: int


class Generation:
    """One membership and one plan at work on this worker.

    Args:
        index: number of the generation.
        world: this worker.
        plan: the layout.
        job: what the user asked for.
        partitions: the model's sections.
        parameters: those held here, by name.
    """

    def __init__(
        self,
        *,
        index: int,
        world: World,
        plan: Plan,
        job: JobSpec,
        partitions: Partitions,
        parameters: Mapping[str, nn.Parameter],
    ) -> None:
        self.index = index
        self.plan = plan
        self.groups = Groups(world, index)
        self.world = world
        self.parameters = parameters
        self.partitions = partitions
        self.job = job
        self._channels: StageChannels | None = None
        self._worker: _StageWorker | None = None
        self._num_evaluations = 0

    def open(self, first_step: int) -> None:
        """Connect to the other workers of the plan and start loading data.

        Raises:
            PeerLost: a worker of the plan did not appear.
        """
        position = self.plan.position_of(self.world.rank)
        self.groups.prepare([range(self.world.size)])
        holders = parameter_holders(self.plan, self.partitions)
        reducer = GradientReducer(self.parameters, holders, self.groups)
        reducer.prepare()
        buffer_ranks = buffer_holders(self.plan, self.partitions)
        self.groups.prepare(buffer_ranks.values())
        if position is None:
            return
        pipeline = self.plan.pipelines[position.pipeline_index]
        self._channels = self._open_channels(position, pipeline)
        buffers = self._buffer_sync(position, pipeline, buffer_ranks)
        self._worker = _StageWorker(
            self,
            position=position,
            pipeline=pipeline,
            reducer=reducer,
            buffers=buffers,
            channels=self._channels,
            first_step=first_step,
        )
        self._worker.start_loading()

    def run_step(self, step_index: int, loss_scale: float) -> Committed:
        """Forward, backward and reduction of one global batch, then the commit; no weight changes here.

        After it every held parameter's ``.grad`` is the sum over the global batch, times ``loss_scale``.
        """
        part = CommitPart(generation=self.index, step_index=step_index)
        if self._worker is not None:
            part = self._worker.run_step(step_index, loss_scale)
        return commit(self.groups, part)

    def undo_buffers(self) -> None:
        """Give buffers that forward changed the values they had before the step."""
        if self._worker is not None:
            self._worker.buffers.restore()

    def evaluate(self, dataset: MapDataset, micro_batch_size: int) -> EvaluationSums:
        """Loss over a whole dataset in eval mode, each sample once; every worker calls it."""
        self._num_evaluations += 1
        sums = torch.zeros(3, dtype=torch.float64)
        if self._worker is not None:
            totals, num_samples = self._worker.evaluate(dataset, micro_batch_size, self._num_evaluations)
            sums = torch.tensor([totals.loss_sum, totals.weight, num_samples], dtype=torch.float64)
        everyone = self.groups.all
        sums = everyone.place(sums)
        everyone.all_reduce_sum(sums)
        loss_sum, weight, count = sums.tolist()
        return EvaluationSums(loss_sum=loss_sum, weight=weight, num_samples=int(count))

    def close(self) -> None:
        """The orderly end: all workers are at the same point and nothing is under way."""
        if self._worker is not None:
            self._worker.loader.close()
        if self._channels is not None:
            self._channels.close()
        self.groups.close()

    def abort(self, reason: str) -> None:
        """The disorderly end: neighbours hear of it at once; from any thread."""
        if self._channels is not None:
            self._channels.close(reason, timeout_s=0.5)
        if self._worker is not None:
            self._worker.loader.close()
        self.groups.close()

    # --- opening ----------------------------------------------------------------------------

    def _buffer_sync(
        self, position: StagePosition, pipeline: PipelineSpec, holders: Mapping[str, tuple[int, ...]]
    ) -> BufferSync:
        stage = pipeline.stages[position.stage_index]
        sections = self.partitions.reference.sections[stage.first_section : stage.end_section]
        changing = [(name, section) for section in sections for name in section.mutated_buffers]
        return BufferSync(
            {name: section.buffers[name] for name, section in changing},
            {name: section.mutated_buffers[name] for name, section in changing},
            holders,
            self.groups,
            micro_batches=range(pipeline.first_micro_batch, pipeline.end_micro_batch),
            num_micro_batches=self.plan.num_micro_batches,
        )

    def _open_channels(self, position: StagePosition, pipeline: PipelineSpec) -> StageChannels | None:
        stages = pipeline.stages
        if len(stages) == 1:
            return None
        at = position.stage_index
        place = StageAddress(
            rank=self.world.rank,
            stage_index=at,
            previous_rank=stages[at - 1].worker_index if at > 0 else None,
            next_rank=stages[at + 1].worker_index if at + 1 < len(stages) else None,
        )
        options = ConnectOptions(generation=self.index, token=self.job.token, host=self.world.address)
        return open_channels(self.world.store, place, options, pin_memory=self.world.device.type == "cuda")


class _StageWorker:
    """A worker that is in a pipeline: its stage, its loader, its reducer."""

    def __init__(
        self,
        generation: Generation,
        *,
        position: StagePosition,
        pipeline: PipelineSpec,
        reducer: GradientReducer,
        buffers: BufferSync,
        channels: StageChannels | None,
        first_step: int,
    ) -> None:
        job, plan = generation.job, generation.plan
        self._channels = channels
        self._job = job
        self._plan = plan
        self._generation = generation
        self._position = position
        self._pipeline = pipeline
        self._device = generation.world.device
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
        self._stage = self._make_stage(training=True, load=self._load)
        self.buffers = buffers

    def start_loading(self) -> None:
        """Begin to load the first step's data, if this stage reads any."""
        if self._reads_data(training=True):
            self.loader.start()

    def run_step(self, step_index: int, loss_scale: float) -> CommitPart:
        """This stage's share of a step, gradients and buffers reduced."""
        self._step_index = step_index
        self._stage.begin_step(step_index, loss_scale)
        self.buffers.begin()
        self._reducer.begin_step()
        run_stage(
            self._stage,
            self._schedule,
            self._channels,
            context=self._context(step_index, "train", self._pipeline.first_micro_batch),
        )
        self._reducer.finish()
        self.buffers.combine()
        totals = self._stage.totals()
        share = range(self._pipeline.first_micro_batch, self._pipeline.end_micro_batch)
        return CommitPart(
            generation=self._generation.index,
            step_index=step_index,
            loss_sum=totals.loss_sum,
            weight=totals.weight,
            num_samples=sum(len(self._plan.micro_batch_samples(k)) for k in share) if self._is_last else 0,
            squared_norm=self._reducer.squared_norm(),
            non_finite_micro_batch=totals.first_non_finite,
        )

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

        def load(k: int) -> StageInputs:
            count = min(micro_batch_size, num_samples - k * micro_batch_size)
            if not self._reads_data(training=False):
                return StageInputs(signature=None, tensors={}, num_samples=count)
            return self._inputs(loader.get(k))

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
            generation=self._generation.index,
            step_index=step_index,
            operation=operation,
            first_micro_batch=first_micro_batch,
            rank=self._generation.world.rank,
            pipeline_index=self._position.pipeline_index,
            stage_index=self._position.stage_index,
        )

    def _make_stage(self, *, training: bool, load: Callable[[int], StageInputs]) -> ModelStage:
        def partition_for(signature: InputSignature | None, num_samples: int) -> Any:
            return self._generation.partitions.get(signature, num_samples, training=training)

        return ModelStage(
            sections=StageSections(self._spec.first_section, self._spec.end_section, partition_for),
            load=load,
            is_first=self._position.stage_index == 0,
            is_last=self._is_last,
            training=training,
            autocast=self._job.autocast,
            seed=self._job.seed,
            device=self._device,
            before_final_backward=self._reducer.begin_final_backward if training else None,
        )

    def _reads_data(self, *, training: bool) -> bool:
        """Whether any section here needs the batch itself, or the loss weight is computed from it."""
        if self._is_last and self._job.loss_weight is not None:
            return True
        partition = self._generation.partitions.reference
        sections = partition.sections[self._spec.first_section : self._spec.end_section]
        return self._position.stage_index == 0 or any(section.input_keys for section in sections)

    def _load(self, micro_batch_index: int) -> StageInputs:
        if not self._reads_data(training=True):
            count = len(self._plan.micro_batch_samples(micro_batch_index))
            return StageInputs(signature=None, tensors={}, num_samples=count)
        return self._inputs(self.loader.get(self._step_index, micro_batch_index))

    def _inputs(self, micro_batch: MicroBatch) -> StageInputs:
        signature = signature_of_flat(micro_batch.flat, micro_batch.num_samples)
        weight = None
        if self._is_last and self._job.loss_weight is not None:
            weight = float(self._job.loss_weight(micro_batch.batch))
        return StageInputs(
            signature=None if signature == self._generation.partitions.signature else signature,
            tensors={
                key: tensor.to(self._device, non_blocking=True)
                for key, tensor in micro_batch.flat.tensors.items()
            },
            num_samples=micro_batch.num_samples,
            weight=weight,
        )


def parameter_holders(plan: Plan, partitions: Partitions) -> dict[str, tuple[int, ...]]:
    """Every parameter, in order of use, to all workers that hold it through any section.

    Parameters that no section uses stay with the first section.
    """
    holders: dict[str, set[int]] = {}
    for section in partitions.reference.sections:
        workers = plan.holders_of(section.spec.index)
        for name in section.parameters:
            holders.setdefault(name, set()).update(workers)
    for name in partitions.unused_parameters:
        holders[name] = set(plan.holders_of(0))
    return {name: tuple(sorted(workers)) for name, workers in holders.items()}


def buffer_holders(plan: Plan, partitions: Partitions) -> dict[str, tuple[int, ...]]:
    """Every buffer that forward changes to the workers that hold it."""
    holders: dict[str, set[int]] = {}
    for section in partitions.reference.sections:
        for name in section.mutated_buffers:
            holders.setdefault(name, set()).update(plan.holders_of(section.spec.index))
    return {name: tuple(sorted(workers)) for name, workers in holders.items()}


def held_names(plan: Plan, partitions: Partitions, rank: int) -> tuple[str, ...]:
    """Names of the parameters that a worker holds under a plan."""
    return tuple(name for name, ranks in parameter_holders(plan, partitions).items() if rank in ranks)


def held_buffers(plan: Plan, partitions: Partitions, rank: int) -> tuple[str, ...]:
    """Names of the buffers that a worker's sections read under a plan."""
    stage = plan.stage_of(rank)
    if stage is None:
        return ()
    sections = partitions.reference.sections[stage.first_section : stage.end_section]
    return tuple(dict.fromkeys(name for section in sections for name in section.buffers))
