"""``Varuna``: the job a user writes.

What happens when: the constructor checks and stores. The first ``train``, ``evaluate`` or ``full_state_dict``
starts the job (``run/start.py``): workers meet, the model is captured and cut, a plan is chosen, each worker
keeps the sections of its stage and gives up the rest. Then every step (``Work.step``) is: forward and backward
through the pipeline, gradient sums, one commit, the same update everywhere.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.pretrained import open_pretrained
from varuna.config import LayoutConfig
from varuna.config_checkpoint import CheckpointConfig
from varuna.errors import ConfigError
from varuna.events import Evaluated, Event, Listener, Notice, StepFinished, TrainFinished, TrainStarted
from varuna.morph.control import ManagedControl
from varuna.morph.script_end import script_end
from varuna.observe import progress_listener
from varuna.persist.registry import Registry, Stateful
from varuna.request import start_request
from varuna.run.arguments import checked_batch_size, checked_num_steps
from varuna.run.call_log import Call, CallLog
from varuna.run.data import check_dataset
from varuna.run.fetch import CollateFn, MapDataset
from varuna.run.gather import gather_state
from varuna.run.generation import EvaluationSums, Generation
from varuna.run.job import LossWeight
from varuna.run.member import Member
from varuna.run.partitions import EXAMPLE_NUM_SAMPLES
from varuna.run.publisher import Publisher
from varuna.spec import Plan, SectionSpec, Step
from varuna.work import JobControl, Work

__all__ = ["Varuna"]


class Varuna:
    """Trains a model across workers. The same script runs on every worker.

    Args:
        model: a module whose forward returns the loss: a scalar (mean over samples), an output with ``.loss``,
            or ``varuna.Loss(sum, weight)``. Or a list of modules, or an ``nn.Sequential``, with ``loss_fn``.
            Built on the CPU, or under ``torch.device("meta")`` and then initialised section by section.
        optimizer: any torch optimizer with state per parameter, over ``model.parameters()``.
        dataset: anything with ``__len__`` and ``__getitem__``.
        batch_size: samples in a global batch, whatever the number of workers.
        lr_scheduler: stepped once after every update that is not skipped.
        precision: ``"fp32"``, ``"bf16"``, ``"fp16"`` or ``"fp64"``.
        clip_grad_norm: largest norm of the whole model's gradient.
        seed: of the order of samples and of all random numbers in forward.
        loss_fn: ``loss_fn(output, *rest_of_batch)`` if forward does not return the loss; the model then gets
            the leading part of the batch that its forward asks for.
        loss_weight: a collated batch to the weight of its mean loss, e.g. its number of valid tokens.
        cut_points: names of modules after which the model may be cut.
        opaque: names of modules that are not to be looked into.
        collate_fn: samples to a batch; torch's default otherwise.
        num_data_workers: processes that load data; 0 loads in line; None: a thread, or a process for random
            data.
        init_weights: ``init_weights(module)`` for models built on the meta device.
        layout: stages, micro-batch size, schedule, recompute; what ``varuna run`` is given goes before it.
        checkpoint: where checkpoints go, how often, and which one to begin from; ``varuna run --checkpoint``
            takes its place.
        check: compare one split step with one unsplit step at start.
        device: where to compute; by default this local rank's GPU, else the CPU.
        progress: print plan and progress on worker 0; or a function that is given every event.

    Raises:
        UserError: something here cannot work; see ``varuna.errors``.
    """

    def __init__(
        self,
        model: nn.Module | Sequence[nn.Module],
        optimizer: Optimizer,
        dataset: MapDataset,
        batch_size: int,
        *,
        lr_scheduler: LRScheduler | None = None,
        precision: str = "fp32",
        clip_grad_norm: float | None = None,
        seed: int = 0,
        loss_fn: Callable[..., Any] | None = None,
        loss_weight: LossWeight | None = None,
        cut_points: Sequence[str] | None = None,
        opaque: Sequence[str] = (),
        collate_fn: CollateFn | None = None,
        num_data_workers: int | None = None,
        init_weights: Callable[[nn.Module], None] | None = None,
        layout: LayoutConfig | None = None,
        checkpoint: CheckpointConfig | None = None,
        check: bool = True,
        device: torch.device | str | None = None,
        progress: bool | Callable[[Event], None] = True,
    ) -> None:
        self._request = start_request(
            os.environ,
            model=model,
            optimizer=optimizer,
            dataset=dataset,
            batch_size=batch_size,
            lr_scheduler=lr_scheduler,
            precision=precision,
            clip_grad_norm=clip_grad_norm,
            seed=seed,
            loss_fn=loss_fn,
            loss_weight=loss_weight,
            cut_points=cut_points,
            opaque=opaque,
            collate_fn=collate_fn,
            num_data_workers=num_data_workers,
            init_weights=init_weights,
            layout=layout,
            check=check,
            device=device,
            step_index=lambda: self.step_index,
        )
        self._checkpoint = CheckpointConfig.from_env(os.environ) or checkpoint
        self._publish = Publisher(_listener(progress), lambda: self.rank == 0).publish
        self._control: JobControl | None = ManagedControl.from_env(os.environ)
        self._calls = CallLog()
        self._registry = Registry()
        self._work: Work | None = None

    # --- what a user asks -------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's index; worker 0 is the one that prints and saves. It may change when workers go."""
        return self._request.config.rank if self._member is None else self._member.rank

    @property
    def step_index(self) -> int:
        """Index of the next step."""
        return 0 if self._work is None else self._work.standing.step_index

    @property
    def plan(self) -> Plan:
        """The layout in use; starts the job if it has not started."""
        return self._started().member.generation.plan

    @property
    def sections(self) -> tuple[SectionSpec, ...]:
        """The model's sections; starts the job if it has not started."""
        return self._started().member.generation.partitions.reference.specs

    def load_pretrained(self, directory: Path | str, *, strict: bool = True, prefix: str = "") -> None:
        """Begin with the weights of a Hugging Face directory of safetensors files. Call it on every worker.

        When the job starts, each worker reads what its stage holds, into the model's own dtypes.

        Args:
            directory: with ``model.safetensors``, or an index and several files.
            strict: it must hold the model and nothing else. Otherwise what it lacks stays as it was built.
            prefix: what your own wrapper puts before every name, such as ``"model."``.

        Raises:
            StateError: it cannot be read or does not fit; the message has the names.
        """
        if self._work is not None:
            raise ConfigError("load_pretrained comes too late: the job has started. Call it after Varuna(...).")
        if not self._request.config.joins:  # whoever joins is given it by the others
            found = open_pretrained(directory, self._request.model, strict=strict, prefix=prefix)
            self._request = replace(self._request, initial=found)
            self._publish(Notice(text=found.summary))

    def register(self, name: str, obj: Stateful) -> None:
        """Have the state of an object in checkpoints, and newcomers be given it. Call it on every worker.

        It must be the same on every worker after every step. Numbers, text, bytes, tensors, NumPy values and
        containers of them can be stored.

        Args:
            name: of your own choice.
            obj: with ``state_dict()`` and ``load_state_dict(state)``.
        """
        if self._work is not None:
            raise ConfigError(f"register({name!r}, ...) comes too late: the job has started. Call it before.")
        self._registry.register(name, obj)

    def train(self, num_steps: int) -> Iterator[Step]:
        """Run ``num_steps`` more steps, yielding each when its update is done. Call it on every worker.

        A job that goes on from a checkpoint makes only the steps that are missing: where a call ends is
        counted from step 0. If no worker is left with the newest state, steps since the last checkpoint come
        again.

        Raises:
            WorkerFailed: the model, ``loss_fn`` or ``loss_weight`` raised on this worker.
            DataError: the dataset or the collate function did.
            PeerLost: another worker failed; the message says why.
            NonFiniteLoss: loss or gradient is inf or nan; no weight was changed.
        """
        num_steps = checked_num_steps(num_steps)
        work = self._ready()
        call, is_over = self._calls.begin("train", self.step_index)
        return iter(()) if is_over else self._train(work, call, num_steps)

    def evaluate(self, dataset: MapDataset, batch_size: int | None = None) -> float:
        """Mean loss over a dataset in eval mode, each sample once. Call it on every worker.

        Args:
            dataset: of any length from 1.
            batch_size: samples per forward pass; by default the micro-batch size.
        """
        check_dataset(dataset)
        micro_batch_size = None if batch_size is None else checked_batch_size(batch_size)
        work = self._ready()
        made, _ = self._calls.begin("evaluate")
        if made.value is not None:
            return made.value
        started_s = time.monotonic()

        def run(generation: Generation) -> EvaluationSums:
            size = micro_batch_size or generation.plan.micro_batch_size
            generation.calls.meet(f"evaluate (of {len(dataset)} samples by {size})")
            partitions = generation.partitions
            generation.calls.in_turn(
                "evaluate (captured)", lambda: partitions.get(None, EXAMPLE_NUM_SAMPLES, training=False)
            )
            return generation.evaluate(dataset, size)

        sums = work.together(run)
        loss = made.value = sums.loss_sum / sums.weight if sums.weight else float("nan")
        duration_s = time.monotonic() - started_s
        self._publish(Evaluated(loss=loss, num_samples=sums.num_samples, duration_s=duration_s))
        return loss

    def full_state_dict(self) -> dict[str, Tensor]:
        """``model.state_dict()`` of the whole model, on the CPU, on worker 0; an empty dict elsewhere.

        Call it on every worker. The names are the plain model's, whatever the layout.
        """

        def run(generation: Generation) -> dict[str, Tensor]:
            generation.calls.meet("full_state_dict")
            generation.job.at("gather")
            return gather_state(self._request.model, generation)

        work = self._ready()
        _, is_over = self._calls.begin("full_state_dict")
        return {} if is_over else work.together(run)

    def close(self) -> None:
        """Part from the other workers in order. Happens by itself when the script ends.

        Where workers come and go it waits for all others to come here too, and helps them meanwhile if one is
        lost. Call it on every worker.
        """
        if self._work is not None:
            self._work.finish()

    def __enter__(self) -> Varuna:
        return self

    def __exit__(self, _: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        del trace
        if error is None or (isinstance(error, SystemExit) and not error.code):
            self.close()
        elif self._work is not None:
            self._work.checkpoints.fail()
            self._work.part()  # nobody is waited for

    # --- inside -----------------------------------------------------------------------------

    @property
    def _member(self) -> Member | None:
        """This worker in the job, once that has started."""
        return self._work.member_or_none if self._work is not None else None

    def _ready(self) -> Work:
        """The job at work, for the next call: with nothing left to do of its last step.

        In the body of a ``train`` loop that is left for its end: a newcomer could not come to this call.
        """
        work = self._started()
        if not self._calls.in_loop or work.is_cut_off:
            work.settle()
        return work

    def _started(self) -> Work:
        """The job at work."""
        if self._work is None:
            self._work = Work(
                self._request,
                checkpoint=self._checkpoint,
                control=self._control,
                calls=self._calls,
                registry=self._registry,
                publish=self._publish,
            )
            if self._control is not None:
                script_end().register(self.close)
        self._work.start()
        return self._work

    def _train(self, work: Work, call: Call, num_steps: int) -> Iterator[Step]:
        started_s = time.monotonic()
        end_step = work.end_step = self._calls.end_of(call, num_steps)
        first_step = self.step_index
        self._publish(TrainStarted(first_step=first_step, num_steps=max(0, end_step - first_step)))
        num_done = 0
        error = ""
        try:
            while self.step_index < end_step:
                step = work.step()
                work.checkpoints.tell_news()
                if step is not None:
                    num_done += 1
                    self._publish(StepFinished(step=step))
                    self._calls.in_loop = True
                    yield step
                    self._calls.in_loop = False
                    work.settle()
            work.collect_trace()
        except GeneratorExit:
            if self.step_index < end_step:
                self._calls.leave(call, self.step_index)
            raise
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            self._calls.in_loop = False
            duration_s = time.monotonic() - started_s
            self._publish(TrainFinished(num_steps=num_done, duration_s=duration_s, error=error))


def _listener(progress: bool | Callable[[Event], None]) -> Callable[[], Listener] | None:
    """Who is told what happens: nobody, a person at the terminal, or the user's own function."""
    if isinstance(progress, bool):
        return progress_listener if progress else None
    return lambda: progress
