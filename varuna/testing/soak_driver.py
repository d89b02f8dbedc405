"""Drives a soak: which fault comes next, when it may, what it cost. ``soak.py`` starts the job and judges."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

from varuna.errors import ConfigError, RunError
from varuna.morph.client import RunClient
from varuna.morph.runs import living_runs
from varuna.morph.views import Status, WorkerState
from varuna.testing.faults import FaultScript
from varuna.testing.soak_choice import (
    Draw,
    can_lose,
    choose_victims,
    draw_faults,
    faults_of,
    members,
    number_of,
)
from varuna.testing.soak_measure import Uses, processes_of, use_of

NUM_WORKERS = 5
_MANAGER_REST_S = 15.0
"""A manager that dies again and again is given up; this is often enough."""

_POLL_S = 0.02
_REST_STEP_S = 0.25
_LAG_S = 1.0
_POINT_S = 10.0
"""A worker that has become a spare meanwhile may not come to the point of its fault for long."""
_PATIENCE_S = 90.0
_WITNESS = 1

Say = Callable[[str], None]
_T = TypeVar("_T")


@dataclass(frozen=True, kw_only=True)
class Soaked:
    """What came of it.

    Attributes:
        counts: faults that happened, by kind.
        num_generations: that the job went through.
        uses: what its processes used.
        uncertain: faults that were asked for and had not happened when the job ended.
    """

    counts: dict[str, int]
    num_generations: int
    uses: Uses
    uncertain: tuple[str, ...] = ()

    @property
    def num_faults(self) -> int:
        """Faults that happened."""
        return sum(self.counts.values())


class Soak:
    """Faults for a job that runs ``soak_job`` with ``NUM_WORKERS`` workers, from outside.

    Args:
        directory: the job's: ``limit`` says which steps may run.
        script: of the faults that happen inside workers.
        cache_dir: where the run is announced.
        num_steps: of the job.
        seed: of what happens.
        num_faults: how many.
        say: told what happens, a line each.
    """

    def __init__(
        self,
        directory: Path,
        script: FaultScript,
        cache_dir: Path,
        *,
        num_steps: int,
        seed: int,
        num_faults: int,
        say: Say = lambda _: None,
    ) -> None:
        self._directory = directory
        self._script = script
        self._cache_dir = cache_dir
        self._num_steps = num_steps
        self._draws = draw_faults(seed, 2 * num_faults)  # some cannot be
        self._num_faults = num_faults
        self._say = say
        self._client: RunClient | None = None
        self._launcher_pid = 0
        self._limit = 0
        self._num_started = NUM_WORKERS
        self._counts: dict[str, int] = {}
        self._pending: dict[int, str] = {}  # kinds of faults that are to happen, by index in the script
        self._doomed: dict[int, int] = {}  # workers that are lost by such faults, or soon; those delayed, too
        self._manager_killed_s = float("-inf")
        self._uses = Uses()
        self.allow(0)

    def run(self, is_alive: Callable[[], bool]) -> Soaked:
        """All faults; then the job may run to its end.

        Args:
            is_alive: whether the job runs.

        Raises:
            RunError: the job ended, stands still, or ran out of steps.
        """
        self._is_alive = is_alive
        status = self._settled()
        self._kill_store()
        for draw in self._draws:
            if sum(self._counts.values()) >= self._num_faults:
                break
            status = self._settled()
            self._one(draw, status)
        status = self._settled()
        self._note_pending()
        self.allow(self._num_steps)
        return Soaked(
            counts=self._counts,
            num_generations=status.generation + 1,
            uses=self._uses,
            uncertain=tuple(self._pending.values()),
        )

    def allow(self, num_steps: int) -> None:
        """Steps up to here may run."""
        self._limit = min(num_steps, self._num_steps)
        self._allowed_s = time.monotonic()
        part = self._directory / "limit.part"
        part.write_text(str(self._limit))
        part.rename(self._directory / "limit")

    # --- one fault --------------------------------------------------------------------------

    def _one(self, draw: Draw, status: Status) -> None:
        kind = draw.kind
        count = 2 if kind in ("kill two", "kill while it forms") else 1
        victims = choose_victims(status, draw, _WITNESS, count, self._doomed.values())
        if kind == "kill the manager" and time.monotonic() < self._manager_killed_s + _MANAGER_REST_S:
            kind = "kill"
        if kind not in ("kill the manager", "kill a newcomer") and not victims:
            self._say(f"{kind}: nobody can be spared")
            return
        if kind == "kill the manager":
            self._kill_manager()
        elif kind == "kill at any time":
            self._kill_worker(victims[0], draw.seconds)
        elif kind == "notice":
            self._notice(victims[0], 30.0 if draw.has_deadline else 0.0)
        elif kind == "kill a newcomer":
            self._script_faults(draw, (), status)
            self._add_workers(1)
        else:
            first = self._script_faults(replace(draw, kind=kind), victims, status)
            until_s = time.monotonic() + _POINT_S
            self._await(lambda: self._has_fired(first) or time.monotonic() > until_s, f"{kind} of {victims[0]}")
            if kind not in ("delay", "short freeze") and self._has_fired(first):
                self._await(lambda: victims[0] not in members(self._status()), f"worker {victims[0]} is missed")

    def _script_faults(self, draw: Draw, victims: tuple[int, ...], status: Status) -> int:
        spares = {number_of(one.incarnation) for one in status.workers if one.position == "spare"}
        faults = faults_of(draw, victims, self._num_started, spares)
        first = self._script.add(*faults)
        for index, fault in enumerate(faults, first):
            self._pending[index] = draw.kind
            if fault.worker is not None:
                self._doomed[index] = fault.worker
            self._say(f"{draw.kind}: worker {fault.worker}, {fault.what} at {fault.point!r}")
        return first

    def _has_fired(self, index: int) -> bool:
        self._note_pending()
        return index not in self._pending

    def _note_pending(self) -> None:
        for fired in self._script.fired():
            if kind := self._pending.pop(fired.index, ""):
                if kind in ("delay", "short freeze"):
                    del self._doomed[fired.index]
                self._count(kind)

    def _count(self, kind: str) -> None:
        self._counts[kind] = self._counts.get(kind, 0) + 1

    def _notice(self, number: int, deadline_s: float) -> None:
        self._say(f"notice: worker {number}, deadline {deadline_s:g} s")
        self._ask(lambda client: client.preempt(str(number), deadline_s))
        self._await(lambda: number not in members(self._status()), f"worker {number} leaves")
        self._count("notice")

    def _kill_worker(self, number: int, after_s: float) -> None:
        """Wherever it is then; more often than not in the middle of a step."""
        self._say(f"kill at any time: worker {number}, after {after_s:.2f} s")
        pid = _pid_of(self._status(), number)
        kill_s = time.monotonic() + after_s
        self.allow(self._limit + 4)
        self._await(lambda: time.monotonic() >= kill_s, "its time")
        os.kill(pid, signal.SIGKILL)
        self._await(lambda: number not in members(self._status()), f"worker {number} is missed")
        self._count("kill at any time")

    def _kill_manager(self) -> None:
        pid = processes_of(self._launcher_pid).get("varuna-manager")
        if pid is None:
            return
        self._say("kill the manager")
        os.kill(pid, signal.SIGKILL)
        self._manager_killed_s = time.monotonic()
        self._await(lambda: processes_of(self._launcher_pid).get("varuna-manager", pid) != pid, "a new manager")
        self._count("kill the manager")

    def _kill_store(self) -> None:
        pid = processes_of(self._launcher_pid)["varuna-store"]
        self._say("kill the first store")
        os.kill(pid, signal.SIGKILL)
        self._count("kill the store")
        self._await(lambda: self._status().generation > 0, "a generation with its own store")

    def _add_workers(self, count: int) -> None:
        if count < 1:
            return
        self._say(f"{count} more workers")
        self._ask(lambda client: client.add_workers(count))
        self._num_started += count

    # --- how it stands ----------------------------------------------------------------------

    def _settled(self) -> Status:
        """Until a generation runs in which one worker can be spared, and enough newcomers are on their way."""

        def has_settled() -> bool:
            status = self._status()
            if status.phase != "running" or any(one.leaving and one.rank is not None for one in _alive(status)):
                return False
            self._note_pending()
            doomed = self._doomed.values()
            if len(status.workers) >= self._num_started:  # all that were asked for have been heard of
                staying = [one for one in _alive(status) if number_of(one.incarnation) not in doomed]
                self._add_workers(NUM_WORKERS - len(staying))
            others = [number for number in members(status) if number != _WITNESS and number not in doomed]
            return any(can_lose(status, (*doomed, number)) for number in others)

        self._await(has_settled, "a generation in which a worker can be spared", step_s=_REST_STEP_S)
        status = self._status()
        self._measure(status)
        return status

    def _await(self, condition: Callable[[], bool], what: str, *, step_s: float = 0.0) -> None:
        """Let step after step run, one every ``step_s`` seconds, until something has happened."""
        next_s = time.monotonic()
        give_up_s = next_s + _PATIENCE_S
        while not condition():
            if not self._is_alive():
                raise RunError(f"The job ended while the soak waited for: {what}.")
            if time.monotonic() > give_up_s:
                raise RunError(f"Not within {_PATIENCE_S:g} s: {what}. {self._status()}")
            if self._limit >= self._num_steps:
                raise RunError(f"The job's {self._num_steps} steps are over, but not the faults.")
            now_s = time.monotonic()
            if self._client is not None and now_s >= next_s and self._may_step(now_s):
                self.allow(self._limit + 1)
                next_s = now_s + step_s
            time.sleep(_POLL_S)

    def _may_step(self, now_s: float) -> bool:
        """Whether all steps that were allowed are done; a manager that was killed may have missed the last."""
        return self._status().num_committed >= self._limit or now_s > self._allowed_s + _LAG_S

    def _status(self) -> Status:
        return self._ask(lambda client: client.status())

    def _ask(self, question: Callable[[RunClient], _T]) -> _T:
        """Ask the manager; it may just be on its way back."""
        give_up_s = time.monotonic() + _PATIENCE_S
        while True:
            try:
                return question(self._found())
            except ConfigError as error:
                if time.monotonic() > give_up_s or not self._is_alive():
                    raise RunError(f"The manager does not answer: {error}") from error
                time.sleep(_POLL_S)

    def _found(self) -> RunClient:
        if self._client is None:
            runs = living_runs(self._cache_dir)
            if len(runs) != 1:
                raise ConfigError(f"{len(runs)} runs are announced in {self._cache_dir}")
            self._client, self._launcher_pid = RunClient(runs[0], self._cache_dir), runs[0].pid
        return self._client

    def _measure(self, status: Status) -> None:
        processes = processes_of(self._launcher_pid)
        judged = {"launcher": self._launcher_pid, f"worker {_WITNESS}": _pid_of(status, _WITNESS)}
        if manager := processes.get("varuna-manager"):
            judged[f"manager {manager}"] = manager
        for name, pid in judged.items():
            self._uses.add(name, use_of(pid, status.generation, len(members(status))))


def _pid_of(status: Status, number: int) -> int:
    return next(one.pid for one in status.workers if number_of(one.incarnation) == number)


def _alive(status: Status) -> list[WorkerState]:
    return [one for one in status.workers if one.status in ("started", "ready", "member")]
