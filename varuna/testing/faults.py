"""Scripted faults: what goes wrong, on which worker, where and when. For your own tests of your own jobs.

    script = FaultScript(tmp_path / "faults", [Fault(what="kill", worker=2, point="commit", step=7)])
    subprocess.run(["varuna", "run", "--workers", "4", "train.py"], env={**os.environ, **script.environ()})
    (fired,) = script.fired()           # it did happen: a test that never met its fault shows nothing

The training script knows nothing of it: workers find the script's directory in ``VARUNA_FAULTS``. There
``faults.json`` has the faults, which may grow while the job runs (``add``), and ``fired.jsonl`` gets a line for
each that happens, before it does. Each happens once, whoever comes first if ``worker`` is None.

Points (``varuna.generations.Point``), in the order of a step: ``step`` a step begins, ``forward`` that of a
micro-batch begins, ``final backward`` the last backward begins, ``reduce`` gradients are all there and not yet
summed, ``commit`` they are, ``committed`` the commit has returned and no weight has changed; and ``start`` a
worker's job starts, ``join`` a newcomer is ready, ``form`` a generation is being formed, ``transfer`` a section
is about to change hands, ``gather`` all have come to gather the whole state, ``save`` part of a checkpoint is
about to be written, ``manifest`` all of its parts are there. These two come in a thread while training goes on.
"""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Literal

import msgspec
from msgspec import Struct

from varuna.errors import ConfigError
from varuna.generations import Point
from varuna.testing.silence import silence_connections

VARIABLE = "VARUNA_FAULTS"

What = Literal["kill", "freeze", "cut", "delay", "hold", "raise"]
_POLL_S = 0.005


class Fault(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Something that goes wrong on a worker.

    Attributes:
        what: ``kill``: SIGKILL. ``freeze``: SIGSTOP, for ``seconds`` or, with 0, for ever. ``cut``: nothing
            comes through the connections it has any more, and nobody is told. ``delay``: it sleeps for
            ``seconds``. ``hold``: it waits until ``FaultScript.release``. ``raise``: a RuntimeError, as from
            the user's own code.
        point: where; see this module.
        worker: its number, as in the name of its log; None for whoever comes first.
        step: index of the step; None for any.
        count: at the count-th time that it comes there in one go at a step.
        seconds: see ``what``.
    """

    what: What
    point: Point
    worker: int | None = None
    step: int | None = None
    count: int = 1
    seconds: float = 0.0

    def __post_init__(self) -> None:
        if self.count < 1 or (self.worker or 0) < 0 or (self.step or 0) < 0:
            raise ConfigError(f"{self}: count is from 1 on, worker and step are from 0 on, or None.")
        if not 0.0 <= self.seconds < float("inf"):
            raise ConfigError(f"{self}: seconds is a number from 0 on.")
        if (self.what == "delay" and self.seconds == 0) or (
            self.what not in ("delay", "freeze") and self.seconds > 0
        ):
            raise ConfigError(f"{self}: give seconds for a delay, perhaps for a freeze, and for nothing else.")


class Fired(Struct, frozen=True, kw_only=True):
    """That a fault has happened.

    Attributes:
        index: of the fault in its script.
        fault: it.
        worker, pid: where.
        step: index of the step there.
        at_s: when, on the machine's monotonic clock.
    """

    index: int
    fault: Fault
    worker: int
    pid: int
    step: int
    at_s: float


class FaultScript:
    """Faults for the workers of one job, from outside.

    Args:
        directory: made if it is missing; of this job alone.
        faults: may be added to later.
    """

    def __init__(self, directory: Path, faults: Sequence[Fault] = ()) -> None:
        self.directory = directory
        self._faults: list[Fault] = []
        directory.mkdir(parents=True, exist_ok=True)
        self.add(*faults)

    def environ(self) -> dict[str, str]:
        """What to add to the environment of ``varuna run``."""
        return {VARIABLE: str(self.directory.absolute())}

    def add(self, *faults: Fault) -> int:
        """More faults, from now on; the index of the first."""
        first = len(self._faults)
        self._faults.extend(faults)
        part = self.directory / "faults.part"
        part.write_bytes(msgspec.json.encode(self._faults))
        part.rename(self.directory / "faults.json")
        return first

    def release(self) -> None:
        """Let those go on that ``hold``, and all that come to hold later."""
        (self.directory / "released").touch()

    def fired(self) -> tuple[Fired, ...]:
        """What has happened so far, in that order."""
        return _fired_in(self.directory)

    def wait_for(self, index: int = 0, *, timeout_s: float = 60.0) -> Fired:
        """That fault ``index`` has happened. Raises ``TimeoutError`` if it does not."""
        give_up_s = time.monotonic() + timeout_s
        while True:
            for fired in self.fired():
                if fired.index == index:
                    return fired
            if time.monotonic() > give_up_s:
                raise TimeoutError(f"{self._faults[index]} has not happened within {timeout_s:g} s.")
            time.sleep(_POLL_S)


def faults_from_env(environ: Mapping[str, str], step_index: Callable[[], int]) -> Callable[[str], None]:
    """What a worker calls at its named points: does nothing unless ``VARUNA_FAULTS`` names a script.

    Args:
        environ: of the worker.
        step_index: tells the index of its step.

    Raises:
        ConfigError: the script cannot be read.
    """
    directory = environ.get(VARIABLE)
    if not directory:
        return lambda _: None
    return Injector(Path(directory), worker_number(environ), step_index).at


def worker_number(environ: Mapping[str, str]) -> int:
    """This worker's number, as in the name of its log."""
    incarnation = environ.get("VARUNA_INCARNATION", "")
    return int(incarnation.rsplit(".", 2)[1] if incarnation else environ.get("RANK") or 0)


class Injector:
    """One worker's side of a script.

    Args:
        directory: the script's.
        worker: this worker's number.
        step_index: tells the index of its step.
    """

    def __init__(self, directory: Path, worker: int, step_index: Callable[[], int]) -> None:
        self._directory = directory
        self._worker = worker
        self._step_index = step_index
        self._version = (0, 0)
        self._faults: list[tuple[int, Fault]] = []
        self._seen: dict[str, int] = {}
        self._lock = threading.Lock()
        self._read()

    def at(self, point: str) -> None:
        """This worker has come to a point; from any thread."""
        step = self._step_index()
        with self._lock:
            self._read()
            if point == "step":
                self._seen.clear()
            self._seen[point] = count = self._seen.get(point, 0) + 1
            due = [
                (index, fault)
                for index, fault in self._faults
                if fault.point == point and fault.step in (None, step) and fault.count == count
            ]
            self._faults = [pair for pair in self._faults if pair not in due]
        for index, fault in due:
            if self._claim(index, fault, step):
                self._happen(fault)

    def _read(self) -> None:
        path = self._directory / "faults.json"
        try:
            status = path.stat()
            if (version := (status.st_ino, status.st_mtime_ns)) == self._version:
                return
            faults = msgspec.json.decode(path.read_bytes(), type=list[Fault])
        except (OSError, msgspec.DecodeError) as error:
            raise ConfigError(
                f"{VARIABLE}={self._directory} names no script of faults ({error}). Make one with "
                f"varuna.testing.faults.FaultScript, or unset {VARIABLE}."
            ) from error
        past = {fired.index for fired in _fired_in(self._directory)}
        self._version = version
        self._faults = [
            (index, fault)
            for index, fault in enumerate(faults)
            if index not in past and fault.worker in (None, self._worker)
        ]

    def _claim(self, index: int, fault: Fault, step: int) -> bool:
        """Write down that it happens; False if it has happened already, somewhere else."""
        mine = Fired(
            index=index, fault=fault, worker=self._worker, pid=os.getpid(), step=step, at_s=time.monotonic()
        )
        with (self._directory / "fired.jsonl").open("ab+") as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            file.seek(0)
            if any(msgspec.json.decode(line, type=Fired).index == index for line in file):
                return False
            file.write(msgspec.json.encode(mine) + b"\n")
        return True

    def _happen(self, fault: Fault) -> None:
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.what == "freeze":
            _freeze(fault.seconds)
        elif fault.what == "cut":
            silence_connections()
        elif fault.what == "delay":
            time.sleep(fault.seconds)
        elif fault.what == "hold":
            while not (self._directory / "released").exists():
                time.sleep(_POLL_S)
        else:
            raise RuntimeError(f"scripted on worker {self._worker}")


def _fired_in(directory: Path) -> tuple[Fired, ...]:
    path = directory / "fired.jsonl"
    lines = path.read_bytes().splitlines() if path.exists() else []
    return tuple(msgspec.json.decode(line, type=Fired) for line in lines)


def _freeze(seconds: float) -> None:
    """Stop this process; somebody else has to wake it."""
    if seconds > 0:
        command = ["/bin/sh", "-c", f"sleep {seconds:.3f}; kill -CONT {os.getpid()}"]
        waker = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
        os.kill(os.getpid(), signal.SIGSTOP)
        waker.wait()
    else:
        os.kill(os.getpid(), signal.SIGSTOP)
