"""``Varuna``: the job a user writes.

What happens when: the constructor checks and stores. The first ``train``, ``evaluate`` or ``full_state_dict``
starts the job (``run/start.py``): workers meet, the model is captured and cut, a plan is chosen, each worker
keeps the sections of its stage and gives up the rest. Then every step (``_step``) is: forward and backward
through the pipeline, gradient sums, one commit, the same update everywhere.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.checkpoint.pretrained import open_pretrained
from varuna.config import LayoutConfig, ProfileConfig, TraceConfig, WorldConfig, cache_dir
from varuna.errors import ConfigError, PeerLost, RunError, WantedEnd
from varuna.events import Evaluated, Event, Listener, Notice, StepFinished, TrainFinished, TrainStarted
from varuna.failure import FailurePlace, marked
from varuna.morph.control import ManagedControl
from varuna.morph.messages import Described
from varuna.observe import progress_listener
from varuna.observe.trace import save_trace
from varuna.partition.sequential import as_module
from varuna.plan.spans import UPDATE
from varuna.run.arguments import (
    check_callables,
    check_layout,
    check_names,
    check_scheduler,
    checked_batch_size,
    checked_clip,
    checked_num_steps,
    checked_seed,
)
from varuna.run.call_log import Call, CallLog
from varuna.run.commit import apply_update, decide, nominal_weight_of
from varuna.run.data import check_dataset
from varuna.run.failure import explain_peer_loss, publish_failure
from varuna.run.fetch import CollateFn, MapDataset
from varuna.run.gather import gather_state
from varuna.run.generation import EvaluationSums, Generation
from varuna.run.groups import World
from varuna.run.job import JobSpec, LossWeight
from varuna.run.job_state import (
    decode_job_state,
    encode_job_state,
    job_state,
    load_options,
    load_schedule,
)
from varuna.run.meeting import store_as_peer
from varuna.run.member import Control, Member
from varuna.run.memory import peak_memory_bytes
from varuna.run.optimizer import check_optimizer, learning_rates
from varuna.run.partitions import EXAMPLE_NUM_SAMPLES, PartitionOptions
from varuna.run.precision import AutocastSpec, LossScaler, Precision
from varuna.run.publisher import Publisher
from varuna.run.random import preserved_generators
from varuna.run.reform import Worker
from varuna.run.start import StartRequest, start_job, start_newcomer
from varuna.run.startup import join_world, pick_device, tokens_per_sample
from varuna.run.trace import Recording, TraceCollector
from varuna.spec import Plan, SectionSpec, Step
from varuna.testing.faults import faults_from_env

__all__ = ["Varuna"]


class JobControl(Control, Protocol):
    """Whoever decides who works in which generation; ``ManagedControl`` if the launcher named a manager."""

    def describe(self, description: Described) -> None:
        """What the job is; said once, by rank 0 of the first generation."""


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
        layout: stages, micro-batch size, schedule, recompute; None reads what ``varuna run`` was given.
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
        check: bool = True,
        device: torch.device | str | None = None,
        progress: bool | Callable[[Event], None] = True,
    ) -> None:
        self._config = WorldConfig.from_env(os.environ)
        self._device = pick_device(self._config, device)
        check_layout(layout)
        layout = layout or LayoutConfig.from_env(os.environ)
        number_format = Precision.parse(precision)
        autocast = AutocastSpec.of(number_format, self._device)
        self._model = as_module(model)
        self._optimizer = optimizer
        self._lr_scheduler = lr_scheduler
        self._clip_grad_norm = checked_clip(clip_grad_norm)
        batch_size = checked_batch_size(batch_size)
        check_dataset(dataset, batch_size)
        check_optimizer(optimizer, self._model)
        check_scheduler(lr_scheduler, optimizer)
        check_names(cut_points=cut_points, opaque=opaque)
        check_callables(
            loss_fn=loss_fn, loss_weight=loss_weight, collate_fn=collate_fn, init_weights=init_weights
        )
        self._trace = TraceConfig.from_env(os.environ)
        self._request = StartRequest(
            model=self._model,
            optimizer=optimizer,
            config=self._config,
            layout=layout,
            precision=number_format,
            check=check and layout.check,
            init_weights=init_weights,
            job=JobSpec(
                dataset=dataset,
                collate_fn=collate_fn,
                num_data_workers=num_data_workers,
                batch_size=batch_size,
                seed=checked_seed(seed),
                autocast=autocast,
                loss_weight=loss_weight,
                token=self._config.token.encode() or self._config.run_id.encode(),
                at=faults_from_env(os.environ, lambda: self._step_index),
            ),
            options=PartitionOptions(
                autocast=autocast,
                cut_points=cut_points,
                opaque=opaque,
                loss_fn=loss_fn,
                cache_dir=cache_dir(os.environ) / "captures",
            ),
            profile=ProfileConfig.from_env(os.environ),
            traced_steps=self._trace.steps if self._trace is not None else range(0),
        )
        self._scaler = LossScaler.initial(number_format)
        self._publish = Publisher(_listener(progress), lambda: self.rank == 0).publish
        self._step_index = 0
        self._member: Member | None = None
        self._control: JobControl | None = ManagedControl.from_env(os.environ)
        self._calls = CallLog()
        self._store: Store | None = None
        self._collector: TraceCollector | None = None
        self._broken = ""

    # --- what a user asks -------------------------------------------------------------------

    @property
    def rank(self) -> int:
        """This worker's index; worker 0 is the one that prints and saves. It may change when workers go."""
        return self._config.rank if self._member is None else self._member.rank

    @property
    def step_index(self) -> int:
        """Index of the next step."""
        return self._step_index

    @property
    def plan(self) -> Plan:
        """The layout in use; starts the job if it has not started."""
        return self._started().generation.plan

    @property
    def sections(self) -> tuple[SectionSpec, ...]:
        """The model's sections; starts the job if it has not started."""
        return self._started().generation.partitions.reference.specs

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
        if self._member is not None:
            raise ConfigError("load_pretrained comes too late: the job has started. Call it after Varuna(...).")
        if not self._config.joins:  # whoever joins is given it by the others
            found = open_pretrained(directory, self._model, strict=strict, prefix=prefix)
            self._request = replace(self._request, initial=found)
            self._publish(Notice(text=found.summary))

    def train(self, num_steps: int) -> Iterator[Step]:
        """Run ``num_steps`` more steps, yielding each when its update is done. Call it on every worker.

        Raises:
            WorkerFailed: the model, ``loss_fn`` or ``loss_weight`` raised on this worker.
            DataError: the dataset or the collate function did.
            PeerLost: another worker failed; the message says why.
            NonFiniteLoss: loss or gradient is inf or nan; no weight was changed.
        """
        num_steps = checked_num_steps(num_steps)
        self._started()
        call, is_over = self._calls.begin("train")
        return iter(()) if is_over else self._train(call, num_steps)

    def evaluate(self, dataset: MapDataset, batch_size: int | None = None) -> float:
        """Mean loss over a dataset in eval mode, each sample once. Call it on every worker.

        Args:
            dataset: of any length from 1.
            batch_size: samples per forward pass; by default the micro-batch size.
        """
        check_dataset(dataset)
        micro_batch_size = None if batch_size is None else checked_batch_size(batch_size)
        member = self._started()
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

        with self._guarded(), preserved_generators(self._device):
            sums = member.together(run)
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
            return gather_state(self._model, generation)

        member = self._started()
        _, is_over = self._calls.begin("full_state_dict")
        if is_over:
            return {}
        with self._guarded():
            return member.together(run)

    def close(self) -> None:
        """Part from the other workers in order. Happens by itself when the process ends."""
        if self._member is not None and not self._broken:
            self._member.generation.close()
            self._broken = "it was closed"

    def __enter__(self) -> Varuna:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # --- start ------------------------------------------------------------------------------

    def _started(self) -> Member:
        if self._broken:
            raise RunError(f"This job cannot go on because {self._broken}. Make a new one.")
        if self._member is None:
            self._member = self._start()
        return self._member

    def _start(self) -> Member:
        self._request.job.at("start")
        world = join_world(self._config, self._device)
        self._store = world.store
        with self._guarded(), preserved_generators(self._device), store_as_peer():
            member = self._join(world) if self._config.joins else self._found(world)
        if self._trace is not None:
            self._collector = TraceCollector(self._trace.steps, lambda: member.generation, self._save_trace)
            self._request.job.spans.subscribe(self._collector)
        return member

    def _found(self, world: World) -> Member:
        """The first generation, with all the workers that were started together."""
        started = start_job(self._request, world, self._publish)
        member = self._member_of(started.worker, started.generation)
        self._describe(started.generation)
        member.start()
        return member

    def _join(self, world: World) -> Member:
        """A place in a job that is at work."""
        member = self._member_of(start_newcomer(self._request, world, self._publish), None)
        member.join()
        return member

    def _describe(self, generation: Generation) -> None:
        """Tell the manager what it plans for."""
        if self._control is None or generation.world.rank != 0:
            return
        layout, job = self._request.layout, self._request.job
        self._control.describe(
            Described(
                sections=generation.partitions.reference.specs,
                batch_size=job.batch_size,
                num_stages=layout.num_stages,
                micro_batch_size=layout.micro_batch_size,
                schedule=layout.schedule,
                recompute=layout.recompute,
                dataset_length=len(job.dataset),
                seed=job.seed,
            )
        )

    def _member_of(self, worker: Worker, generation: Generation | None) -> Member:
        return Member(
            worker, generation, self._control, tell_state=self._tell_state, take_state=self._take_state
        )

    def _tell_state(self) -> bytes:
        """What every member has besides its sections, for those that join."""
        return encode_job_state(
            job_state(self._step_index, self._scaler, self._optimizer, self._lr_scheduler, self._calls.calls)
        )

    def _take_state(self, data: bytes) -> None:
        state = decode_job_state(data)
        self._step_index = state.step_index
        self._scaler = self._scaler.with_state(state.scaler)
        self._calls.take(state.calls)
        load_options(self._optimizer, state.param_groups)
        if self._lr_scheduler is not None:
            load_schedule(self._lr_scheduler, state.lr_scheduler)

    def _save_trace(self, recording: Recording) -> None:
        assert self._trace is not None
        told = save_trace(self._trace.path, recording.workers, clock_accuracy_s=recording.clock_accuracy_s)
        self._publish(Notice(text=told))

    # --- one step ---------------------------------------------------------------------------

    def _train(self, call: Call, num_steps: int) -> Iterator[Step]:
        started_s = time.monotonic()
        end_step, first_step = self._calls.end_of(call, num_steps), self._step_index
        self._publish(TrainStarted(first_step=first_step, num_steps=max(0, end_step - first_step)))
        num_done = 0
        error = ""
        try:
            while self._step_index < end_step:
                generation_index = self._started().generation.index
                step = self._step()
                num_done += 1
                if self._control is not None:
                    self._control.step_done(generation_index, step)
                self._publish(StepFinished(step=step))
                yield step
            if self._collector is not None:
                with self._guarded():
                    self._collector.collect()
        except GeneratorExit:
            if self._step_index < end_step:
                self._calls.leave(call, self._step_index)
            raise
        except BaseException as raised:
            error = f"{type(raised).__name__}: {raised}"
            raise
        finally:
            duration_s = time.monotonic() - started_s
            self._publish(TrainFinished(num_steps=num_done, duration_s=duration_s, error=error))

    def _step(self) -> Step:
        member = self._started()
        started_s = time.monotonic()
        rates = learning_rates(self._optimizer)
        spans = self._request.job.spans
        with self._guarded(), preserved_generators(self._device), spans.step(self._step_index):
            nominal_weight = nominal_weight_of(self._request.job.batch_size)
            committed = member.run_step(self._step_index, self._scaler.scale / nominal_weight)
            update = decide(
                committed,
                clip_grad_norm=self._clip_grad_norm,
                scaler=self._scaler,
                nominal_weight=nominal_weight,
            )
            place = FailurePlace(step_index=self._step_index, operation="optimizer step")
            with marked(place), spans.span(UPDATE):
                parameters = member.generation.parameters.values()
                apply_update(update, parameters, self._optimizer, self._lr_scheduler)
            self._scaler = update.scaler
            self._step_index += 1
            member.update_done()
        duration_s = time.monotonic() - started_s
        tokens = tokens_per_sample(member.generation.partitions.signature)
        samples_per_s = update.num_samples / duration_s
        return Step(
            index=committed.step_index,
            loss=update.loss,
            weight=update.weight,
            num_samples=update.num_samples,
            grad_norm=update.grad_norm,
            lr=rates[0] if rates else math.nan,
            learning_rates=rates,
            skipped=update.skipped,
            loss_scale=update.loss_scale,
            duration_s=duration_s,
            samples_per_s=samples_per_s,
            tokens_per_s=None if tokens is None else tokens * samples_per_s,
            memory_bytes=peak_memory_bytes(self._device),
        )

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever goes wrong inside is told to the other workers, and none of them waits any longer."""
        try:
            yield
        except WantedEnd:
            raise
        except PeerLost as error:
            self._give_up(error)
            raise explain_peer_loss(self._current_store, self._generation_index, error) from error
        except BaseException as error:
            publish_failure(self._current_store, self._generation_index, self.rank, error)
            self._give_up(error)
            raise

    @property
    def _current_store(self) -> Store:
        """The one that the members of this generation share."""
        store = self._store if self._member is None else self._member.generation.world.store
        assert store is not None, "not started"
        return store

    @property
    def _generation_index(self) -> int:
        return 0 if self._member is None else self._member.generation.index

    def _give_up(self, error: BaseException) -> None:
        self._broken = f"an error ended it ({type(error).__name__}: {error})"
        if self._member is not None:
            self._member.generation.abort(f"{type(error).__name__}: {error}")


def _listener(progress: bool | Callable[[Event], None]) -> Callable[[], Listener] | None:
    """Who is told what happens: nobody, a person at the terminal, or the user's own function."""
    if isinstance(progress, bool):
        return progress_listener if progress else None
    return lambda: progress
