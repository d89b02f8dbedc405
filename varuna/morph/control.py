"""A member's side of the manager: what ``varuna.run.member.Control`` asks for, over a ``Link``.

The training thread reports and waits; the link's thread takes orders meanwhile: to pause or abort the
generation at work or being formed, and how to go on after a halt. A worker that the manager does not want any
more (it was fenced while it was frozen, say) gives up its generation at once and ends.
"""

from __future__ import annotations

import contextlib
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import replace
from typing import Protocol

from varuna.errors import ConfigError, RunError, WantedEnd
from varuna.generations import Formation, FormingTimes, HaltReport, StepReport, Verdict
from varuna.morph.link import Link, Refusal
from varuna.morph.messages import (
    Abort,
    Beat,
    CheckpointComplete,
    Described,
    Finished,
    Form,
    Formed,
    FromWorker,
    Halted,
    Leave,
    Pause,
    Ready,
    StepDone,
    decode_to_worker,
    encode,
)
from varuna.morph.script_watch import ScriptWatch
from varuna.morph.terminal import take_terminal
from varuna.morph.whereabouts import manager_url
from varuna.spec import Plan

BEAT_S = 0.5
"""Seconds between two signs of life."""

FENCED_STATUS = 410

GIVE_UP_S = 15.0
"""A worker whose script is over waits so long for a manager that is not there."""

_LOOK_S = 1.0


_REFORMED = "VARUNA_REFORMED"
"""Set in this process's environment once its workers are not those any more that were started together."""


def note_on_further_job(environ: Mapping[str, str]) -> str:
    """What people should know of a job that is not the first of its script; empty if it is.

    A manager has one job. The next one of the same script is worked on by the same workers, which were numbered
    when they were started: so it cannot go on without one of them, nor begin if one of them is gone.

    Raises:
        RunError: workers have come or gone.
    """
    if not environ.get("VARUNA_INCARNATION") or "VARUNA_MANAGER" in environ:
        return ""
    if environ.get(_REFORMED) or environ.get("VARUNA_JOINS") == "1":
        raise RunError(
            "A script's first job goes on when workers come and go; a further one in the same script needs the "
            "workers that were started together, and they have changed. Give each job a script of its own, or "
            "use `varuna run --no-morph`."
        )
    return (
        "only the first job of a script goes on when workers come and go: this one ends with the first worker "
        "that is lost"
    )


class LiveGeneration(Protocol):
    """What a member's generation is to the control: something that can be paused and aborted."""

    index: int
    pause: bool
    plan: Plan
    forming_times: FormingTimes

    def abort(self, reason: str) -> None:
        """End it at once, from any thread."""


class ManagedControl:
    """One worker's line to its manager.

    Args:
        url: of the manager, ``http://host:port``; or of a file that has it, see ``whereabouts``.
        token: the job's.
        incarnation: this worker's.
    """

    def __init__(self, url: str, token: str, incarnation: str) -> None:
        self._url = url
        self._lock = threading.Lock()
        self._generation: LiveGeneration | None = None
        self._aborted: dict[int, str] = {}
        self._paused: set[int] = set()
        self._state: FromWorker | None = None
        self._description: Described | None = None
        self._is_described = False
        self._founded: Formed | None = None  # its plan is known from nobody else, whatever has happened since
        self._checkpoint: CheckpointComplete | None = None
        self._found: CheckpointComplete | None = None
        self._orders: queue.SimpleQueue[Form | Leave | Refusal | Abort] = queue.SimpleQueue()
        self._is_finished = False
        self._newest_order = -1
        self._wait_s = 0.0
        self._watch = ScriptWatch(incarnation, lambda message: self._link.send(encode(message)))
        self._link = Link(
            lambda: f"{manager_url(url)}/worker",
            token,
            {"incarnation": incarnation},
            received=self._received,
            greeting=self._greeting,
            refused=self._refused,
            beat=encode(Beat()),
            beat_s=BEAT_S,
        )

    @staticmethod
    def from_env(environ: MutableMapping[str, str]) -> ManagedControl | None:
        """The manager that the launcher named, or None. It has one job a process: whoever asks first gets it.

        Raises:
            ConfigError: the variables say half of what is needed.
        """
        url = environ.pop("VARUNA_MANAGER", "")
        if not url:
            return None
        incarnation = environ.get("VARUNA_INCARNATION", "")
        if not incarnation:
            raise ConfigError("VARUNA_MANAGER is set, but not VARUNA_INCARNATION. `varuna run` sets both.")
        return ManagedControl(url, environ.get("VARUNA_TOKEN", ""), incarnation)

    @property
    def is_there(self) -> bool:
        """See ``varuna.run.member.Control``."""
        return self._link.is_connected

    # --- the training thread ----------------------------------------------------------------

    def in_script(self, value: bool) -> None:
        """See ``varuna.work.JobControl``."""
        self._watch.in_script(value)

    def describe(self, description: Described, *, at_once: bool) -> None:
        """See ``varuna.work.JobControl``."""
        with self._lock:
            self._description = description
        if at_once:
            self._tell_description()

    def checkpointed(self, checkpoint: CheckpointComplete) -> None:
        """See ``varuna.work.JobControl``."""
        with self._lock:
            if checkpoint.is_found:
                self._found = checkpoint
            else:
                self._checkpoint = checkpoint
        self._link.send(encode(checkpoint))

    def ready(self, digest: str, store_address: str) -> Formation:
        """See ``varuna.run.member.Control``."""
        self._tell(Ready(digest=digest, store_address=store_address))
        return self._next_order().formation

    def halted(self, report: HaltReport) -> Verdict:
        """See ``varuna.run.member.Control``."""
        halted_s = time.monotonic()
        self._tell(Halted(report=report))
        verdict = self._next_order()
        self._wait_s = time.monotonic() - halted_s
        return verdict

    def forming(self, generation: LiveGeneration) -> None:
        """See ``varuna.run.member.Control``."""
        with self._lock:
            self._generation = generation
            reason = self._aborted.get(generation.index, "")
        if reason:
            generation.abort(reason)

    def formed(self, generation: LiveGeneration) -> None:
        """See ``varuna.run.member.Control``."""
        with self._lock:
            generation.pause = generation.index in self._paused
        plan = generation.plan if generation.index == 0 else None
        times = replace(generation.forming_times, wait_s=self._wait_s)
        formed = Formed(generation=generation.index, plan=plan, times=times)
        if plan is not None:
            with self._lock:
                self._founded = formed
        self._tell(formed)

    def step_done(self, report: StepReport) -> None:
        """See ``varuna.run.member.Control``."""
        message = StepDone(
            generation=report.generation,
            step_index=report.step_index,
            duration_s=report.duration_s,
            busy_s=report.work.busy_s,
            num_samples=report.num_samples,
            committed=report.committed,
            samples=report.work.samples,
        )
        self._link.send(encode(message))

    def finished(self, report: HaltReport, check: Callable[[], None]) -> Verdict | None:
        """See ``varuna.run.member.Control``."""
        with self._lock:
            self._is_finished = True
            is_over = report.generation in self._aborted
        self._tell(Halted(report=report) if is_over else Finished(report=report))
        away_since_s: float | None = None
        while True:
            order: Form | Leave | Refusal | Abort | None = None
            with contextlib.suppress(queue.Empty):
                order = self._orders.get(timeout=_LOOK_S)
            if order is None:
                check()
                if self._link.is_connected:
                    away_since_s = None
                elif away_since_s is None:
                    away_since_s = time.monotonic()
                elif time.monotonic() > away_since_s + GIVE_UP_S:  # there will be none any more
                    self.close()
                    return None
                continue
            if isinstance(order, Leave):
                self.close()
                return None
            if isinstance(order, Abort):
                if order.generation == report.generation and not is_over:
                    is_over = True
                    self._tell(Halted(report=report))
                continue
            verdict = self._verdict(order)
            if verdict is not None:
                return verdict

    def close(self) -> None:
        """This worker's script is over."""
        self._link.close()

    def _tell(self, state: Ready | Halted | Formed | Finished) -> None:
        if isinstance(state, Halted | Finished) and state.report.generation == 0:
            self._tell_description()  # whoever should have may be lost
        with self._lock:
            self._state = state
        self._link.send(encode(state))
        if isinstance(state, Halted | Finished):
            self._watch.ended(state.report.generation)

    def _tell_description(self) -> None:
        with self._lock:
            description, is_told = self._description, self._is_described
            self._is_described = True
        if description is not None and not is_told:
            self._link.send(encode(description))

    def _next_order(self) -> Verdict:
        while True:
            order = self._orders.get()
            if isinstance(order, Leave):
                self.close()
                raise WantedEnd
            if isinstance(order, Abort):  # it has halted already
                continue
            verdict = self._verdict(order)
            if verdict is not None:
                return verdict

    def _verdict(self, order: Form | Refusal) -> Verdict | None:
        """How to go on; None if that was heard before."""
        if isinstance(order, Refusal):
            self._orders.put(order)  # it stays so
            if order.status == FENCED_STATUS:
                raise WantedEnd
            raise RunError(f"The manager at {self._url} refuses this worker: {order.reason}.")
        if order.formation.generation <= self._newest_order:  # a restarted manager may repeat itself
            return None
        self._newest_order = order.formation.generation
        os.environ[_REFORMED] = "1"
        if order.formation.rank == 0:
            take_terminal(os.environ)
        formation = replace(order.formation, checkpoint=order.checkpoint)
        return Verdict(formation=formation, committed=order.committed)

    # --- the link's thread ------------------------------------------------------------------

    def _greeting(self) -> list[bytes]:
        with self._lock:
            description = self._description if self._is_described else None
            founded = None if self._founded is self._state else self._founded
            messages = (description, founded, self._found, self._state, self._checkpoint)
        return [encode(message) for message in messages if message is not None]

    def _received(self, data: bytes) -> None:
        message = decode_to_worker(data)
        if isinstance(message, Pause):
            with self._lock:
                self._paused.add(message.generation)
                if self._generation is not None and self._generation.index == message.generation:
                    self._generation.pause = True
        elif isinstance(message, Abort):
            with self._lock:
                self._aborted[message.generation] = message.reason
                generation = self._generation
                if self._is_finished:
                    self._orders.put(message)
            if generation is not None and generation.index == message.generation:
                self._watch.should_end(message.generation)
                generation.abort(message.reason)
        else:
            self._orders.put(message)

    def _refused(self, refusal: Refusal) -> None:
        with self._lock:
            generation = self._generation
        self._orders.put(refusal)
        if generation is not None:
            generation.abort(f"the manager refuses this worker: {refusal.reason}")
