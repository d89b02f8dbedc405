"""Everything that belongs to one membership and one plan: groups, channels, stage, reducer, loader.

A generation is opened, runs steps and evaluations, and is closed, all in the same process; the next one starts
from a new plan. What outlives it (model, optimizer, loss scale, step number) is handed in.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import nn

from varuna.generations import FormingTimes, StepWork
from varuna.plan.spans import COMMIT
from varuna.run.buffers import BufferSync
from varuna.run.calls import Calls
from varuna.run.channel import StageChannels, open_channels
from varuna.run.commit import CommitPart, Committed, SaveMark, commit
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.fetch import MapDataset
from varuna.run.groups import Groups, World
from varuna.run.holders import buffer_holders, parameter_holders
from varuna.run.job import JobSpec
from varuna.run.partitions import Partitions
from varuna.run.reduce import GradientReducer
from varuna.run.stage_worker import StageWorker
from varuna.run.switches import SwitchAgreement
from varuna.spec import PipelineSpec, Plan, StagePosition


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
        parameters: those held here, by name; may be set later, before ``open``.
        hang_up: ends every wait for the store, from any thread.

    Attributes:
        reduced_step: a step whose gradients are reduced and whose commit has not returned: another worker may
            know how it ended.
        pause: asked to end after the step under way; every member finds out in that step's commit.
        save: worker 0's wish that the state after the step under way be saved; likewise.
        forming_times: what its forming took, if it followed another.
        is_aborted: it was given up.
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
        forming_timeout_s: float = 300.0,
        hang_up: Callable[[], None] = lambda: None,
    ) -> None:
        self.index = index
        self.plan = plan
        self.reduced_step: int | None = None
        self.pause = False
        self.save: SaveMark | None = None
        self.is_aborted = False
        self.forming_times = FormingTimes()
        self.groups = Groups(world, index, forming_timeout_s=forming_timeout_s)
        self.calls = Calls(world, index)
        self.world = world
        self.parameters = parameters
        self.partitions = partitions
        self.job = job
        self._hang_up = hang_up
        self._channels: StageChannels | None = None
        self._worker: StageWorker | None = None
        self._num_evaluations = 0
        self._switches = SwitchAgreement(partitions.model, partitions.flags, world.rank, world.size)

    def open(self, first_step: int) -> None:
        """Connect to the other workers of the plan and start loading data.

        Raises:
            PeerLost: a worker of the plan did not appear, or failed before it came here.
        """
        self.calls.meet("the start")
        position = self.plan.position_of(self.world.rank)
        self.groups.prepare([range(self.world.size)])
        holders = parameter_holders(self.plan, self.partitions)
        reducer = GradientReducer(self.parameters, holders, self.groups)
        reducer.prepare()
        buffer_ranks = buffer_holders(self.plan, self.partitions)
        self.groups.prepare(buffer_ranks.values())
        self.groups.everybody_is_here()
        if position is None:
            return
        pipeline = self.plan.pipelines[position.pipeline_index]
        self._channels = self._open_channels(position, pipeline)
        buffers = self._buffer_sync(position, pipeline, buffer_ranks)
        self._worker = StageWorker(
            index=self.index,
            world=self.world,
            plan=self.plan,
            job=self.job,
            partitions=self.partitions,
            position=position,
            reducer=reducer,
            buffers=buffers,
            channels=self._channels,
            first_step=first_step,
        )
        self._worker.start_loading()

    def run_step(self, step_index: int, gradient_scale: float, goes_on: Callable[[], bool]) -> Committed:
        """Forward, backward and reduction of one global batch, then the commit; no weight changes here.

        After it every held parameter's ``.grad`` is the sum over the global batch, times ``gradient_scale``.
        ``goes_on`` is asked if the store is gone: whether the step is made without it.
        """
        self.job.at("step")
        self.calls.announce_step(step_index, goes_on, self._switches.note())
        if not self.calls.store_is_lost:
            self._switches.check(partial(self.calls.note_of, step_index=step_index))
        part = CommitPart(generation=self.index, step_index=step_index)
        if self._worker is not None:
            part = self._worker.run_step(step_index, gradient_scale)
        self.reduced_step = step_index
        self.job.at("commit")
        with self.job.spans.span(COMMIT):
            committed = commit(self.groups, replace(part, pause=self.pause, save=self.save))
        self.job.at("committed")
        self.keep_step()
        return committed

    def work(self) -> StepWork:
        """What was done here in the last step."""
        return StepWork() if self._worker is None else self._worker.work()

    def keep_step(self) -> None:
        """The step under way is committed: ``undo_step`` has nothing to undo any more."""
        self.reduced_step = None
        if self._worker is not None:
            self._worker.buffers.keep()

    def undo_step(self) -> None:
        """Forget the step under way, which was not committed: buffers as before it, no gradients."""
        if self._worker is not None:
            self._worker.undo_step()
        for parameter in self.parameters.values():
            parameter.grad = None

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
        """The disorderly end: neighbours hear of it at once, and no wait here lasts; from any thread."""
        self.is_aborted = True
        self.calls.abort(reason)
        self._hang_up()
        if self._channels is not None:
            self._channels.close(reason, timeout_s=0.5)
        self.groups.close(in_order=False)
        if self._worker is not None:
            self._worker.loader.close()  # last: it waits for a sample that is being read

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
