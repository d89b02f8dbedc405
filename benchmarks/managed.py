"""A `varuna run` whose workers a benchmark takes away and adds, and all that its manager tells of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from varuna.morph.client import RunClient
from varuna.morph.runs import living_runs
from varuna.morph.views import LoggedEvent, WorkerState
from varuna.testing.replay_account import seconds_of

REPOSITORY = Path(__file__).parents[1]
_POLL_S = 0.02


class ManagedRun:
    """One run with a cache of its own; a context.

    Args:
        workers: at the start.
        arguments: of `varuna run`: options, script, its own arguments.
        heartbeat_s: after which a silent worker is taken for dead.
    """

    def __init__(self, workers: int, arguments: Sequence[str], *, heartbeat_s: float) -> None:
        self._folder = tempfile.TemporaryDirectory(prefix="varuna-bench-")
        self._cache = Path(self._folder.name) / "cache"
        environ = {
            **os.environ,
            "VARUNA_CACHE_DIR": str(self._cache),
            "VARUNA_HEARTBEAT_S": str(heartbeat_s),
            "OMP_NUM_THREADS": "1",
        }
        self._log = Path(self._folder.name) / "output"
        logs = ("--log-dir", str(Path(self._folder.name) / "logs"))
        command = [sys.executable, "-m", "varuna", "run", "--workers", str(workers), "--morph", *logs]
        with self._log.open("wb") as output:
            self._process = subprocess.Popen(
                [*command, *arguments],
                cwd=REPOSITORY, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
            )  # fmt: skip
        self.events: list[LoggedEvent] = []
        self._told = threading.Condition()
        self.client = self._find()
        self._thread = threading.Thread(target=self._follow)
        self._thread.start()

    def __enter__(self) -> ManagedRun:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.send_signal(signal.SIGINT)
        try:
            self._process.wait(15)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._thread.join(15)
        self._folder.cleanup()

    def wait(
        self, what: str, holds: Callable[[list[LoggedEvent]], bool], since: int, timeout_s: float = 60
    ) -> list[LoggedEvent]:
        """Until it holds of the events from number ``since`` on; those.

        Raises:
            RuntimeError: it took too long, or the run has ended.
        """
        until_s = time.monotonic() + timeout_s
        with self._told:
            while not holds(self.events[since:]):
                if time.monotonic() > until_s or self._process.poll() is not None:
                    told = "\n".join(
                        f"{event.at[11:]} {event.kind}: {event.text}" for event in self.events[-40:]
                    )
                    said = self._log.read_text(errors="replace")[-3000:]
                    raise RuntimeError(f"Not within {timeout_s:g} s: {what}\n{told}\n{said}")
                self._told.wait(0.2)
            return self.events[since:]

    def members(self) -> list[WorkerState]:
        """Workers of the generation, by rank."""
        return [worker for worker in self.client.status().workers if worker.status == "member"]

    def _find(self) -> RunClient:
        until_s = time.monotonic() + 60
        while time.monotonic() < until_s and self._process.poll() is None:
            for run in living_runs(self._cache):
                return RunClient(run, self._cache)
            time.sleep(_POLL_S)
        raise RuntimeError(f"The run has not started.\n{self._log.read_text(errors='replace')}")

    def _follow(self) -> None:
        for event in self.client.events(follow=True):
            with self._told:
                self.events.append(event)
                self._told.notify_all()


def first(events: Sequence[LoggedEvent], kind: str) -> float:
    """Unix time of the first event of a kind."""
    return next(seconds_of(event) for event in events if event.kind == kind)
