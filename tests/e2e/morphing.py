"""Runs in which workers come and go, and what they are compared with: one process that nothing disturbs."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import nn

from tests.cases import jobs as cases
from tests.cases import models
from tests.cases.jobs import Training
from tests.e2e.following import Following
from tests.e2e.jobs import Ended, Warm
from tests.launch.jobs import wait_until
from varuna.errors import ConfigError
from varuna.morph.client import RunClient
from varuna.morph.ledger import audit
from varuna.morph.ledger_table import read_ledger
from varuna.morph.runs import living_runs
from varuna.morph.views import LoggedEvent, Status
from varuna.testing.faults import Fault, FaultScript, Point, What

NUM_STEPS = 40
TRAINING = Training(
    model=functools.partial(models.Tagger, states_weight=True, tied=True, dropout=0.3),
    dataset=models.text(),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [8, 25], gamma=0.5),
    batch_size=12,
    micro_batch_size=2,
    num_steps=NUM_STEPS,
    options={"clip_grad_norm": 0.5, "precision": "fp64"},
)
EXACT = 1e-12


def switch_off(model: nn.Module) -> None:
    """What a loop's body may do between steps."""
    model.get_parameter("blocks.0.weight").requires_grad_(False)
    model.get_submodule("drop").eval()


def fault(
    what: What, worker: int, point: Point, step: int | None = None, count: int = 1, *, seconds: float = 0.0
) -> Fault:
    """Something that goes wrong on a worker."""
    return Fault(what=what, point=point, worker=worker, step=step, count=count, seconds=seconds)


class Run:
    """One that is at work, or over. All its faults must happen."""

    def __init__(
        self,
        warm: Warm,
        directory: Path,
        cache_dir: Path,
        *faults: Fault,
        workers: int = 4,
        stages: int = 2,
        limit: int = NUM_STEPS,
        environ: Mapping[str, str] | None = None,
        script: str = "morphing.py",
        arguments: Sequence[str] = (),
    ) -> None:
        self.directory = directory
        self.script = FaultScript(directory / "faults", faults)
        self.ended: Ended | None = None
        self._num_faults = len(faults)
        self._switches = "switches" in arguments
        self._cache_dir = cache_dir
        self._client: RunClient | None = None
        self._following: Following | None = None
        self.limit(limit)
        self.job = warm.run(
            directory,
            script,
            str(NUM_STEPS),
            *arguments,
            workers=workers,
            stages=stages,
            micro_batch_size=TRAINING.micro_batch_size,
            cache_dir=cache_dir,
            morphs=True,
            # steps take milliseconds here: on a busy machine some worker would always be slow
            environ={"VARUNA_FIND_SLOW": "0", **self.script.environ(), **(environ or {})},
        )

    @property
    def client(self) -> RunClient:
        """Of the manager."""
        if self._client is None:
            wait_until(lambda: living_runs(self._cache_dir), 120, "the run is announced")
            (run,) = living_runs(self._cache_dir)
            self._client = RunClient(run, self._cache_dir)
        return self._client

    def add(self, *faults: Fault) -> None:
        """More that is to happen, from now on."""
        self.script.add(*faults)
        self._num_faults += len(faults)

    def limit(self, num_steps: int) -> None:
        """Steps up to here may run."""
        (self.directory / "limit.part").write_text(str(num_steps))
        (self.directory / "limit.part").rename(self.directory / "limit")

    def event(self, kind: str, text: str = "") -> LoggedEvent:
        """The next event of a kind with a text in it; those before it have been seen then."""
        event = self.events.next(kind, text, 120)
        if event is None:
            raise AssertionError(self.wait().stderr)
        return event

    @property
    def events(self) -> Following:
        """All of them."""
        if self._following is None:
            self._following = Following(self.client)
        return self._following

    def status(self) -> Status:
        """How it stands; a manager that starts on a busy machine is given time to answer."""
        for _ in range(2):
            with contextlib.suppress(ConfigError):
                return self.client.status()
        return self.client.status()

    def steps_done(self, num_steps: int) -> None:
        """Until so many steps have happened."""
        wait_until(lambda: self.status().num_committed >= num_steps, 120, f"{num_steps} steps")

    def fired(self, worker: int) -> None:
        """Until the fault of a worker has happened."""
        wait_until(
            lambda: any(one.worker == worker for one in self.script.fired()), 30, f"worker {worker}'s fault"
        )

    def process(self, name: str) -> psutil.Process:
        """The only process of the run that has this name, or these words in its command line."""
        (found,) = (one for one in self.everyone() if name == one.name() or name in " ".join(one.cmdline()))
        return found

    def everyone(self) -> list[psutil.Process]:
        """All processes of the run."""
        launcher = psutil.Process(self.job.pid)
        return [launcher, *launcher.children(recursive=True)]

    def kill_manager(self) -> None:
        """Kill it; it is started again."""
        manager = self.process("varuna-manager")
        manager.kill()
        manager.wait(10)

    def worker(self, number: int) -> psutil.Process:
        """A worker's process."""
        return self.process(f"varuna-worker-{number}")

    def wait(self) -> Ended:
        """Its end; nothing is left of it."""
        self.ended = self.job.wait()
        log = (self.directory / "logs" / "manager.log").read_text()
        assert not log, log
        assert self.ended.left == []
        assert living_runs(self._cache_dir) == []
        return self.ended

    def abandon(self) -> None:
        """End it, if a test has not come to its end."""
        if self.ended is None:
            with contextlib.suppress(psutil.NoSuchProcess):
                for process in self.everyone():
                    process.kill()
            self.ended = self.job.wait()

    def ends_well(self) -> Ended:
        """Its end, which is a good one."""
        ended = self.wait()
        assert ended.codes == [0], ended.stderr
        assert len(self.script.fired()) == self._num_faults
        return ended

    # --- what came of it --------------------------------------------------------------------

    def steps(self, worker: int) -> list[dict[str, Any]]:
        """Steps that a worker saw."""
        path = self.directory / f"steps-{worker}.jsonl"
        return [json.loads(line) for line in path.read_text().splitlines() if line.endswith("}")]

    def is_exact(self) -> None:
        """Every step that any worker saw, and the final weights, are those of the undisturbed run."""
        assert self.steps_are_exact() == set(range(NUM_STEPS))
        self.ledger_is_right()
        self.end_is_exact()

    def steps_are_exact(self, *, goes_back: bool = False) -> set[int]:
        """Every step that any worker saw is that of the undisturbed run; which these are."""
        _, expected = undisturbed(self._switches)
        seen: set[int] = set()
        for path in self.directory.glob("steps-*.jsonl"):
            steps = self.steps(int(path.stem.removeprefix("steps-")))
            indices = [step["index"] for step in steps]
            if indices and not goes_back:
                assert indices == list(range(indices[0], indices[0] + len(indices)))
            seen.update(indices)
            for step in steps:
                check_step(step, expected[step["index"]])
        return seen

    def end_is_exact(self) -> None:
        """The final weights are those of the undisturbed run, and so is what each script has added up."""
        expected_state, expected = undisturbed(self._switches)
        for path in self.directory.glob("seen-*.json"):
            seen = json.loads(path.read_text())
            assert seen["num_steps"] == NUM_STEPS
            assert seen["loss_sum"] == pytest.approx(sum(step["loss"] for step in expected), rel=EXACT)
        state = cases.decode(json.loads((self.directory / "state.json").read_text()))
        assert state.keys() == expected_state.keys()
        for name, value in expected_state.items():
            difference = (state[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)
            assert difference <= EXACT, (name, float(difference))

    def ledger_is_right(self, first_step: int = 0) -> None:
        """Every step from the first on happened once, with the samples that it should have."""
        view = read_ledger(self.directory / "logs" / "journal.sqlite")
        assert view.order is not None
        assert audit(view.entries, view.order, NUM_STEPS, view.shares) == ()
        assert len(view.entries) == NUM_STEPS - first_step


def check_step(mine: dict[str, Any], theirs: dict[str, Any]) -> None:
    """A step is that of the undisturbed run."""
    for key in ("index", "weight", "num_samples", "lr", "skipped"):
        assert mine[key] == theirs[key], (key, mine, theirs)
    for key in ("loss", "grad_norm"):
        assert mine[key] == pytest.approx(theirs[key], rel=EXACT), (key, mine, theirs)


@functools.cache
def undisturbed(switches: bool = False) -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    """Final weights and steps; ``switches``: after the first, ``switch_off``."""
    training = dataclasses.replace(TRAINING, observe=switch_off) if switches else TRAINING
    ran = cases.train(training, num_workers=1)
    return ran.state, ran.steps
