"""A job at work on one worker: its start, one step after another, its end; what ``Varuna`` does the work with.

The steps are those of one process. What can happen between them, that workers come and go, is ``Member``'s;
what is kept of them, ``Checkpoints``'.
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Protocol, TypeVar

from torch.distributed import Store  # type: ignore[attr-defined]

from varuna.checkpoint.values import SaveOrder
from varuna.config import TraceConfig
from varuna.config_checkpoint import CheckpointConfig
from varuna.errors import PeerLost, RunError, WantedEnd
from varuna.events import Event, Notice
from varuna.failure import FailurePlace, marked
from varuna.morph.control import note_on_further_job
from varuna.morph.messages import CheckpointComplete, Described
from varuna.observe.trace import save_trace
from varuna.persist.checkpoints import Checkpoints, worker_name
from varuna.persist.registry import Registry
from varuna.persist.standing import Standing
from varuna.plan.spans import UPDATE
from varuna.run.call_log import CallLog
from varuna.run.commit import Committed, SaveMark, apply_update, decide, nominal_weight_of
from varuna.run.failure import explain_peer_loss, publish_failure
from varuna.run.generation import Generation
from varuna.run.groups import World
from varuna.run.meeting import store_as_peer
from varuna.run.member import Control, Member
from varuna.run.optimizer import learning_rates
from varuna.run.precision import LossScaler
from varuna.run.random import preserved_generators
from varuna.run.reform import Worker
from varuna.run.start import StartedJob, StartRequest, start_job, start_newcomer
from varuna.run.startup import join_world
from varuna.run.step_report import step_of
from varuna.run.trace import Recording, TraceCollector
from varuna.spec import Step

_T = TypeVar("_T")


class JobControl(Control, Protocol):
    """Whoever decides who works in which generation; ``ManagedControl`` if the launcher named a manager."""

    def describe(self, description: Described, *, at_once: bool) -> None:
        """What the job is: told at once, or when this worker's first generation ends, if it is unknown then."""

    def in_script(self, value: bool) -> None:
        """The training thread goes to the script's own code, which nothing can break off, or comes back."""

    def checkpointed(self, checkpoint: CheckpointComplete) -> None:
        """The job can go back to a checkpoint; from any thread."""

    def close(self) -> None:
        """This worker takes part in the job no more."""


class Work:
    """One worker's job at work.

    Args:
        request: what it is started from.
        checkpoint: what the user asked for of checkpoints.
        control: who decides; None if nobody does.
        calls: of the script.
        registry: objects of the user's.
        publish: hears what happens.

    Attributes:
        standing: where the job stands.
        checkpoints: of the job.
        broken: why it cannot go on; empty while it can.
        end_step: where the script's call of ``train`` ends.
    """

    def __init__(
        self,
        request: StartRequest,
        *,
        checkpoint: CheckpointConfig | None,
        control: JobControl | None,
        calls: CallLog,
        registry: Registry,
        publish: Callable[[Event], None],
    ) -> None:
        self.standing = Standing(
            model=request.model,
            optimizer=request.optimizer,
            lr_scheduler=request.lr_scheduler,
            scaler=LossScaler.initial(request.precision),
            job=request.job,
            calls=calls,
            registry=registry,
        )
        self.checkpoints = Checkpoints(
            checkpoint,
            self.standing,
            request.optimizer,
            publish=publish,
            complete=self._tell_checkpoint,
            name=worker_name(request.config.rank, joins=request.config.joins),
        )
        self.broken = ""
        self.end_step = 0
        self._request = replace(request, begin=self.checkpoints.begin)
        self._control = control
        self._publish = publish
        self._trace = TraceConfig.from_env(os.environ)
        self._unsettled: Committed | None = None
        self._store: Store | None = None
        self._member: Member | None = None
        self._collector: TraceCollector | None = None

    @property
    def member(self) -> Member:
        """This worker in the job."""
        assert self._member is not None, "not started"
        return self._member

    @property
    def member_or_none(self) -> Member | None:
        """The same; None before the start."""
        return self._member

    # --- start ------------------------------------------------------------------------------

    def start(self) -> None:
        """Start the job if it has not started.

        Raises:
            RunError: it cannot go on.
        """
        if self.broken:
            raise RunError(f"This job cannot go on because {self.broken}. Make a new one.")
        if self._member is None:
            self._member = self._begun()

    def _begun(self) -> Member:
        request = self._request
        request.job.at("start")
        if self._control is None and (note := note_on_further_job(os.environ)):
            self._publish(Notice(text=note))
        world = join_world(request.config, request.device)
        self._store = world.store
        with self._guarded(), store_as_peer():
            member = self._join(world) if request.config.joins else self._found(world)
        self.checkpoints.started(member.worker, lambda: member.generation)
        if self._trace is not None:
            self._collector = TraceCollector(self._trace.steps, lambda: member.generation, self._save_trace)
            request.job.spans.subscribe(self._collector)
        return member

    def _found(self, world: World) -> Member:
        """The first generation, with all the workers that were started together."""
        started = start_job(self._request, world, self._publish)
        member = self._member_of(started.worker, started.generation)
        self._describe(started)
        member.start()
        return member

    def _join(self, world: World) -> Member:
        """A place in a job that is at work."""
        member = self._member_of(start_newcomer(self._request, world, self._publish), None)
        self.checkpoints.look()
        member.join()
        return member

    def _member_of(self, worker: Worker, generation: Generation | None) -> Member:
        return Member(worker, generation, self._control, carried=self.checkpoints, wish=self._wish)

    def _describe(self, started: StartedJob) -> None:
        """Tell the manager what it plans for; worker 0 does, but may be lost before it is heard."""
        generation, choice = started.generation, started.choice
        if self._control is None:
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
                profile=started.profile,
                dataset_length=len(job.dataset),
                seed=job.seed,
                first_step=self.standing.step_index,
                last_save=self.standing.last_sequence,
                step_s=choice.step_s,
                micro_batch_s=choice.micro_batch_s,
            ),
            at_once=generation.world.rank == 0,
        )

    def _tell_checkpoint(self, order: SaveOrder, address: str, is_found: bool) -> None:
        if self._control is not None:
            self._control.checkpointed(
                CheckpointComplete(
                    next_step=order.step, sequence=order.sequence, address=address, is_found=is_found
                )
            )

    # --- steps ------------------------------------------------------------------------------

    def step(self) -> Step | None:
        """The next update; None if the whole job went back to a checkpoint instead."""
        self.start()
        self.settle()
        request, member, standing = self._request, self.member, self.standing
        started_s = time.monotonic()
        rates = learning_rates(request.optimizer)
        spans = request.job.spans
        with self._guarded(), spans.step(standing.step_index):
            nominal_weight = nominal_weight_of(request.job.batch_size)
            committed = member.run_step(standing.step_index, standing.scaler.scale / nominal_weight)
            if committed is None:
                return None
            update = decide(
                committed,
                clip_grad_norm=request.clip_grad_norm,
                scaler=standing.scaler,
                nominal_weight=nominal_weight,
            )
            place = FailurePlace(step_index=standing.step_index, operation="optimizer step")
            with marked(place), spans.span(UPDATE):
                parameters = member.generation.parameters.values()
                apply_update(update, parameters, request.optimizer, request.lr_scheduler)
            standing.scaler = update.scaler
            standing.step_index += 1
            member.update_done()
            self._unsettled = committed
        return step_of(
            committed,
            update,
            learning_rates=rates,
            duration_s=time.monotonic() - started_s,
            signature=member.generation.partitions.signature,
            device=request.device,
        )

    @property
    def is_cut_off(self) -> bool:
        """The generation of the last step is over: nothing can be done together before the next one."""
        return self.member.has_formation

    def settle(self) -> None:
        """After the loop's body: save the state if that was agreed on, end the generation if that was.

        Objects that the user registered have seen the step then.
        """
        committed, self._unsettled = self._unsettled, None
        if committed is None:
            return
        member = self.member
        with self._guarded():
            if committed.save is not None:
                self.checkpoints.save(committed.save, member.worker, member.generation)
            member.go_on()

    def together(self, call: Callable[[Generation], _T]) -> _T:
        """What all workers do together and no step depends on; after the last step is settled."""
        member = self.member
        with self._guarded():
            return member.together(call)

    def collect_trace(self) -> None:
        """Write the trace, if it was asked for and its steps are over."""
        if self._collector is not None:
            with self._guarded():
                self._collector.collect()

    def _wish(self, step_index: int) -> SaveMark | None:
        """Worker 0, before a step: whether to save the state after it."""
        return self.checkpoints.wish(step_index + 1, is_last=step_index + 1 == self.end_step)

    def _save_trace(self, recording: Recording) -> None:
        assert self._trace is not None
        told = save_trace(self._trace.path, recording.workers, clock_accuracy_s=recording.clock_accuracy_s)
        self._publish(Notice(text=told))

    # --- the end ----------------------------------------------------------------------------

    def finish(self) -> None:
        """The script is over: wait for all others, help them meanwhile if one is lost, and part."""
        if self._member is None or self.broken:
            return
        self.settle()
        with self._guarded():
            self._member.finish(self.checkpoints.settle)
        self.part()

    def part(self) -> None:
        """Part from the others without waiting for them."""
        if self._member is None or self.broken:
            return
        self.checkpoints.close()
        self._member.generation.close()
        self.broken = "it was closed"
        if self._control is not None:
            self._control.close()

    @contextlib.contextmanager
    def _guarded(self) -> Iterator[None]:
        """Whatever goes wrong inside is told to the other workers, and none of them waits any longer."""
        self._in_script(False)
        try:
            with preserved_generators(self._request.device):
                yield
        except WantedEnd:
            self.checkpoints.leave()
            self.broken = "this worker was asked to leave"
            raise
        except PeerLost as error:
            self._give_up(error)
            raise explain_peer_loss(self._current_store, self._generation_index, error) from error
        except BaseException as error:
            rank = self._request.config.rank if self._member is None else self._member.rank
            publish_failure(self._current_store, self._generation_index, rank, error)
            self._give_up(error)
            raise
        finally:
            self._in_script(True)

    def _in_script(self, value: bool) -> None:
        if self._control is not None:
            self._control.in_script(value)

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
        self.broken = f"an error ended it ({type(error).__name__}: {error})"
        self.checkpoints.fail()
        if self._member is not None:
            self._member.generation.abort(f"{type(error).__name__}: {error}")
