"""Varuna jobs over forked workers, with whatever a test wants to know about them.

    results = run_workers(4, body)                    # body() -> value, once per worker, in its environment
    ran = train(Training(...), num_workers=4)         # the usual body: train, then the whole state

Values may hold tensors: they come back bit for bit.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import os
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch._dynamo
import torch.export
from torch import Tensor, nn

import varuna
import varuna.session  # it and torch's parts above are imported before forking, so that workers need not
from tests.run import processes

TIME_LIMIT_S = 120.0


def run_workers(num_workers: int, body: Callable[..., Any], *arguments: Any) -> list[Any]:
    """``body(*arguments)`` in each of ``num_workers`` new processes that the environment calls one world."""
    answers = processes.run_workers(
        num_workers, _work, str(_captures()), body, arguments, time_limit_s=TIME_LIMIT_S
    )
    return [decode(answer) for answer in answers]


def _work(context: processes.Context, captures: str, body: Callable[..., Any], arguments: Sequence[Any]) -> Any:
    os.environ.update(
        RANK=str(context.rank),
        WORLD_SIZE=str(context.world.size),
        LOCAL_RANK=str(context.rank),
        LOCAL_WORLD_SIZE=str(context.world.size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(context.port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="case",
        VARUNA_CACHE_DIR=captures,
    )
    return encode(body(*arguments))


@functools.cache
def _captures() -> Path:
    """Jobs of one test run share their captures; removed when pytest ends."""
    directory = Path(tempfile.mkdtemp(prefix="varuna-cases-"))
    atexit.register(_remove, directory, os.getpid())
    return directory


def _remove(directory: Path, owner_pid: int) -> None:
    if os.getpid() == owner_pid:
        shutil.rmtree(directory)


def another_job(name: str) -> None:
    """Called on every worker before it makes one more job: a run of its own in the same world."""
    os.environ["TORCHELASTIC_RUN_ID"] = name


# --- the usual job --------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Training:
    """What ``train`` runs; functions make everything anew in every worker.

    Attributes:
        model: makes it; generators are seeded before.
        dataset: shared by all workers.
        optimizer: over the model's parameters. SGD with learning rate 1 by default, so that the change of a
            parameter in one step is its gradient.
        scheduler: of an optimizer's learning rate.
        batch_size, micro_batch_size, num_steps: of the run.
        num_stages, schedule, recompute: the layout.
        options: more arguments of ``varuna.Varuna``.
        observe: called after every step with the job's model; what it returns is kept.
    """

    model: Callable[[], nn.Module]
    dataset: Any
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] = lambda model: torch.optim.SGD(
        model.parameters(), lr=1.0
    )
    scheduler: Callable[[torch.optim.Optimizer], Any] | None = None
    batch_size: int = 15
    micro_batch_size: int = 2
    num_steps: int = 1
    num_stages: int = 1
    schedule: str | None = None
    recompute: bool | tuple[bool, ...] = False
    options: dict[str, Any] = field(default_factory=dict)
    observe: Callable[[nn.Module], Any] | None = None

    def make_model(self) -> nn.Module:
        """The model in fp64 (unless it says ``dtype``), equal in every process."""
        torch.manual_seed(7)
        model = self.model()
        return model.to(getattr(model, "dtype", torch.float64))

    def job(self) -> tuple[varuna.Varuna, nn.Module]:
        """The job of this worker, not yet started, and its model."""
        model = self.make_model()
        optimizer = self.optimizer(model)
        arguments: dict[str, Any] = {"progress": False, "check": False, "seed": 3, "device": "cpu"}
        arguments.update(self.options)
        if self.scheduler is not None:
            arguments["lr_scheduler"] = self.scheduler(optimizer)
        layout = varuna.Layout(
            num_stages=self.num_stages,
            micro_batch_size=self.micro_batch_size,
            schedule=self.schedule,
            recompute=self.recompute,
        )
        return varuna.Varuna(model, optimizer, self.dataset, self.batch_size, layout=layout, **arguments), model


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of it.

    Attributes:
        state: ``full_state_dict()`` of worker 0.
        steps: one ``varuna.Step`` per step as a dict; the same numbers on every worker.
        observed: per worker, what ``observe`` returned after each step.
    """

    state: dict[str, Tensor]
    steps: list[dict[str, Any]]
    observed: list[list[Any]]

    def __getattr__(self, name: str) -> list[Any]:
        """``ran.loss``: that number of every step."""
        return [step[name] for step in self.steps]


SAME_EVERYWHERE = (
    "index",
    "loss",
    "weight",
    "num_samples",
    "grad_norm",
    "learning_rates",
    "skipped",
    "loss_scale",
)


def train(training: Training, *, num_workers: int = 1) -> Ran:
    """Trains on forked workers and compares what they report."""
    results = run_workers(num_workers, train_here, training)
    return collect(results)


def train_here(training: Training) -> dict[str, Any]:
    """One worker's part of ``train``."""
    job, model = training.job()
    steps, observed = [], []
    with job:
        for step in job.train(training.num_steps):
            steps.append(dataclasses.asdict(step))
            observed.append(None if training.observe is None else training.observe(model))
        return {"steps": steps, "observed": observed, "state": job.full_state_dict()}


def collect(results: Sequence[dict[str, Any]]) -> Ran:
    """What all workers' ``train_here`` returned, as one.

    Raises:
        AssertionError: workers report different numbers, or one but worker 0 has a state.
    """
    for name in SAME_EVERYWHERE:
        values = [[repr(step[name]) for step in result["steps"]] for result in results]
        assert all(value == values[0] for value in values), f"Workers report different {name}: {values}"
    assert all(result["state"] == {} for result in results[1:])
    return Ran(
        state=results[0]["state"],
        steps=results[0]["steps"],
        observed=[result["observed"] for result in results],
    )


# --- values through a pipe ------------------------------------------------------------------


def encode(value: Any) -> Any:
    """A value as JSON; fp32 and fp64 numbers survive exactly."""
    if isinstance(value, Tensor):
        dtype = str(value.dtype).removeprefix("torch.")
        return {"tensor": value.detach().cpu().flatten().tolist(), "shape": list(value.shape), "dtype": dtype}
    if isinstance(value, dict):
        return {"dict": [[key, encode(item)] for key, item in value.items()]}
    if isinstance(value, list | tuple):
        return [encode(item) for item in value]
    return value


def decode(value: Any) -> Any:
    """What ``encode`` was given; tuples are lists."""
    if isinstance(value, list):
        return [decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    if "dict" in value:
        return {key: decode(item) for key, item in value["dict"]}
    return torch.tensor(value["tensor"], dtype=getattr(torch, value["dtype"])).reshape(value["shape"])
