"""Runs a Varuna job over forked workers and compares what it trained with the plain loop."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
from torch import Tensor
from torch.distributed import TCPStore

import varuna
from tests.exact import models, plain
from tests.exact.forker import Request

BATCH_SIZE = 15
MICRO_BATCH_SIZE = 2
NUM_STEPS = 5
SEED = 3
TIMEOUT_S = 120.0
REPOSITORY = Path(__file__).parents[2]


@dataclass(frozen=True, kw_only=True)
class Run:
    """One point of the product: a model and a layout. With m = 2 and 15 samples, N = 8 and the last has one."""

    case: str
    num_stages: int
    num_pipelines: int
    schedule: str
    recompute: bool

    def __str__(self) -> str:
        recompute = "recompute" if self.recompute else "keep"
        return f"{self.case}-{self.num_stages}x{self.num_pipelines}-{self.schedule}-{recompute}"


class Forker:
    """The process that forks workers (``tests.exact.forker``), and the captures they share."""

    def __init__(self, process: subprocess.Popen[str], cache_dir: Path) -> None:
        self._process, self.cache_dir = process, cache_dir

    def run(self, run: Run, **changed: Any) -> plain.Trained:
        """Train ``run`` with Varuna; ``changed`` replaces fields of the request.

        Raises:
            AssertionError: a worker failed (with the output of all), or workers report different numbers.
        """
        store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        with tempfile.TemporaryDirectory(prefix="varuna-exact-") as name:
            fields = {
                "case": run.case,
                "num_workers": run.num_stages * run.num_pipelines,
                "num_stages": run.num_stages,
                "micro_batch_size": MICRO_BATCH_SIZE,
                "schedule": run.schedule,
                "recompute": run.recompute,
                "batch_size": BATCH_SIZE,
                "num_steps": NUM_STEPS,
                "seed": SEED,
                "directory": name,
                "master_port": store.port,
                "timeout_s": TIMEOUT_S,
            }
            request = Request(**{**fields, **changed})
            codes = self._ask(request)
            directory = Path(name)
            assert not any(codes), f"{run}: exit codes {codes}\n{_output(directory)}"
            return _collect(directory, request.num_workers)

    def _ask(self, request: Request) -> list[int]:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(request.to_json() + "\n")
        self._process.stdin.flush()
        answer = self._process.stdout.readline()
        assert answer, f"The forker ended with {self._process.poll()}."
        return json.loads(answer)


@contextmanager
def forker(cache_dir: Path) -> Iterator[Forker]:
    """A forker for as long as the block runs."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "VARUNA_CACHE_DIR": str(cache_dir)}
    process = subprocess.Popen(
        [sys.executable, "-W", "ignore", "-m", "tests.exact.forker"],
        cwd=REPOSITORY,
        env=environment,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            assert process.stdout is not None
            assert process.stdout.readline() == "ready\n", "The forker did not start; its output is above."
            yield Forker(process, cache_dir)
    finally:
        process.kill()
        process.wait()


def _output(directory: Path) -> str:
    return "\n".join(f"--- {log.name}\n{log.read_text()[-6000:]}" for log in sorted(directory.glob("*.log")))


def _collect(directory: Path, num_workers: int) -> plain.Trained:
    """The state from worker 0 and the steps, which must be the same numbers on every worker."""
    all_steps = [json.loads((directory / f"steps-{rank}.json").read_text()) for rank in range(num_workers)]
    for name in ("index", "loss", "weight", "num_samples", "grad_norm", "lr", "skipped"):
        values = [[step[name] for step in steps] for steps in all_steps]
        assert all(value == values[0] for value in values), f"Workers report different {name}: {values}"
    return plain.Trained(
        state=safetensors.torch.load_file(directory / "state.safetensors"),
        losses=[step["loss"] for step in all_steps[0]],
        grad_norms=[step["grad_norm"] for step in all_steps[0]],
    )


@functools.cache
def reference(case_name: str) -> plain.Trained:
    """The plain loop's result on the samples that Varuna's order names."""
    case = models.case(case_name)
    dataset = case.dataset()
    ids = [varuna.sample_ids(step, len(dataset), BATCH_SIZE, SEED) for step in range(NUM_STEPS)]
    with torch.random.fork_rng(devices=[]):
        return plain.train(
            case.model(plain=True), dataset, ids, MICRO_BATCH_SIZE, collate=case.collate, loss_fn=case.loss_fn
        )


def difference(ours: Tensor, theirs: Tensor) -> float:
    """Largest difference over the largest magnitude; 0 for equal tensors, integers included."""
    if ours.shape != theirs.shape or ours.dtype != theirs.dtype:
        raise AssertionError(f"{ours.dtype}{list(ours.shape)} is not {theirs.dtype}{list(theirs.shape)}")
    if torch.equal(ours, theirs):
        return 0.0
    scale = theirs.double().abs().max().item()
    return (ours.double() - theirs.double()).abs().max().item() / scale if scale else float("inf")


def assert_same(ours: plain.Trained, theirs: plain.Trained, bound: float) -> None:
    """Every parameter, buffer, loss and norm within ``bound``, relative; names the worst."""
    missing, extra = theirs.state.keys() - ours.state.keys(), ours.state.keys() - theirs.state.keys()
    assert not missing and not extra, f"missing {sorted(missing)}, extra {sorted(extra)}"  # noqa: PT018
    worst = sorted(_differences(ours, theirs).items(), key=lambda item: -item[1])
    assert worst[0][1] <= bound, f"worst of {len(worst)}, bound {bound:g}: {worst[:4]}"


def _differences(ours: plain.Trained, theirs: plain.Trained) -> Mapping[str, float]:
    differences = {name: difference(ours.state[name], theirs.state[name]) for name in theirs.state}
    for what in ("losses", "grad_norms"):
        mine = torch.tensor(getattr(ours, what), dtype=torch.float64)
        differences[what] = difference(mine, torch.tensor(getattr(theirs, what), dtype=torch.float64))
    return differences
