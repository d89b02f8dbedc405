"""Jobs of several "machines": a manager and agents, each a `varuna` command of its own."""

from __future__ import annotations

import contextlib
import json
import os
import signal
from collections.abc import Mapping, Sequence
from pathlib import Path

import psutil

from tests.cases import jobs as cases
from tests.e2e.following import Following
from tests.e2e.jobs import SCRIPTS, Warm
from tests.e2e.morphing import EXACT, NUM_STEPS, check_step, undisturbed
from tests.launch.jobs import wait_until
from varuna.morph.client import RunClient
from varuna.morph.ledger import audit
from varuna.morph.ledger_table import read_ledger
from varuna.morph.runs import living_runs
from varuna.morph.views import LoggedEvent, Status

LOOPBACK = "127.0.0.1"
_NUM_SHOWN = 60


class Cluster:
    """A job: one manager, and agents that come and go."""

    def __init__(
        self,
        warm: Warm,
        directory: Path,
        *,
        captures: Path,
        min_workers: int = 4,
        limit: int = NUM_STEPS,
        address: str = LOOPBACK,
    ) -> None:
        self.directory = directory
        self.state = directory / "state"
        self._warm = warm
        self._environ = {
            "VARUNA_CACHE_DIR": str(directory / "cache"),
            "VARUNA_CLOUD": "none",
            "VARUNA_FIND_SLOW": "0",
        }
        self._address = address
        self._min_workers = min_workers
        self._pids: dict[str, int] = {}
        self._following: Following | None = None
        self._client: RunClient | None = None
        (directory / "cache").mkdir()
        (directory / "cache" / "captures").symlink_to(captures)
        self.limit(limit)
        self.start_manager()

    # --- commands ---------------------------------------------------------------------------

    def start_manager(self) -> None:
        """The manager, perhaps again."""
        self._client = self._following = None
        flags = ["--state", "state", "--min-workers", str(self._min_workers), "--settle", "0.2"]
        self._start("manager", ["manager", "--listen", f"{self._address}:0", *flags], {})

    def start_agent(
        self,
        name: str,
        workers: int = 2,
        *flags: str,
        environ: Mapping[str, str] | None = None,
        namespace: str = "",
        script: str = "machines.py",
        arguments: Sequence[str] = (str(NUM_STEPS),),
    ) -> None:
        """A machine."""
        command = ["agent", "--manager", self.url, "--token-file", "state/token", "--name", name]
        command += ["--workers", str(workers), "--stages", "2", "--micro-batch-size", "2"]
        command += ["--log-dir", f"logs-{name}", *flags, str(SCRIPTS / script), *arguments]
        self._start(name, command, environ or {}, namespace)

    def _start(self, name: str, arguments: list[str], environ: Mapping[str, str], namespace: str = "") -> None:
        self._pids[name] = self._warm.start(
            self.directory, name, arguments, {**self._environ, **environ}, namespace=namespace
        )

    def signal(self, name: str, signum: int) -> None:
        """A signal to a command."""
        os.kill(self._pids[name], signum)

    def join(self, name: str) -> int:
        """The exit code of a command."""
        return self._warm.join(self._pids.pop(name))

    def processes(self, name: str) -> list[psutil.Process]:
        """All processes of a command."""
        launcher = psutil.Process(self._pids[name])
        return [launcher, *launcher.children(recursive=True)]

    def told(self, name: str) -> str:
        """What a command has written to standard error."""
        return (self.directory / f"{name}.err").read_text()

    def _story(self) -> str:
        """The last lines of all that commands and workers have written to standard error."""
        paths = sorted([*self.directory.glob("*.err"), *self.directory.glob("logs-*/*.log")])
        lines = {path: path.read_text(errors="replace").splitlines()[-_NUM_SHOWN:] for path in paths}
        return "\n".join(f"{path.name}: {line}" for path in paths for line in lines[path])

    def abandon(self) -> None:
        """End whatever a test has left, and say what that was."""
        for pid in self._pids.values():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for name in list(self._pids):
            self.join(name)
        self._warm.left()

    # --- the job ----------------------------------------------------------------------------

    @property
    def client(self) -> RunClient:
        """Of the manager."""
        if self._client is None:
            cache = self.directory / "cache"
            wait_until(lambda: living_runs(cache), 120, "the run is announced")
            self._client = RunClient(living_runs(cache)[-1], cache)
        return self._client

    @property
    def url(self) -> str:
        """Of the manager."""
        return self.client.run.url

    def limit(self, num_steps: int) -> None:
        """Steps up to here may run."""
        (self.directory / "limit.part").write_text(str(num_steps))
        (self.directory / "limit.part").rename(self.directory / "limit")

    def status(self) -> Status:
        """How it stands."""
        return self.client.status()

    def steps_done(self, num_steps: int) -> None:
        """Until so many steps have happened."""
        wait_until(lambda: self.status().num_committed >= num_steps, 120, f"{num_steps} steps")

    def event(self, kind: str, text: str = "", within_s: float = 120) -> LoggedEvent:
        """The next event of a kind with a text in it."""
        if self._following is None:
            self._following = Following(self.client)
        event = self._following.next(kind, text, within_s)
        assert event is not None, self._story()
        return event

    def members(self) -> dict[str, str]:
        """Machines of the members, by incarnation."""
        return {one.incarnation: one.machine for one in self.status().workers if one.status == "member"}

    def ends_well(self, *names: str) -> None:
        """The manager and these agents end with the job, and nothing is left."""
        codes = {name: self.join(name) for name in (*names, "manager")}
        assert codes == dict.fromkeys(codes, 0), self._story()
        assert self._warm.left() == []
        assert living_runs(self.directory / "cache") == []
        log = (self.state / "manager.log").read_text()
        assert not log, log

    def is_exact(self) -> None:
        """Every step that any worker saw, and the final weights, are those of the undisturbed run."""
        expected_state, expected = undisturbed()
        seen: set[int] = set()
        for path in self.directory.glob("steps-*.jsonl"):
            steps = [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]
            seen.update(step["index"] for step in steps)
            for step in steps:
                check_step(step, expected[step["index"]])
        assert seen == set(range(NUM_STEPS))
        view = read_ledger(self.state / "journal.sqlite")
        assert view.order is not None
        assert audit(view.entries, view.order, NUM_STEPS, view.shares) == ()
        assert len(view.entries) == NUM_STEPS
        state = cases.decode(json.loads((self.directory / "state.json").read_text()))
        assert state.keys() == expected_state.keys()
        for name, value in expected_state.items():
            difference = (state[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)
            assert difference <= EXACT, (name, float(difference))
