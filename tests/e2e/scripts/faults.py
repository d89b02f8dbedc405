"""Trains a small model and fails as asked: ``faults.py WHAT WHERE RANK``, on worker RANK only.

WHAT: raise, exit3 (``sys.exit(3)``), os_exit (``os._exit(4)``), kill (SIGKILL to itself), block (wait for
ever), evaluate (call it, alone), leave (end the loop and the script), nan (a sample that is not a number).
WHERE, at the start: build (the user's script), probe (the first samples), capture (forward meanwhile).
WHERE, in the second step: forward, backward, dataset, collate, loss_weight, optimizer, loop (the user's own,
between steps), evaluate (forward in it).

The file ``fault`` then gets the time. Without a fault it would train 10 000 steps.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import varuna

WHAT, WHERE, RANK = sys.argv[1], sys.argv[2], int(sys.argv[3])


def is_mine() -> bool:
    """Whether this worker is to fail. Unlike a global, no part of the capture's key: all share one capture."""
    return int(vars(os)["environ"].get("RANK", "0")) == RANK


BATCH_SIZE = 8
progress = {"steps": 0}


def is_due(where: str) -> bool:
    """Whether this is the place, the worker and the time; if so it is noted."""
    if (
        where != WHERE
        or not is_mine()
        or (progress["steps"] < 1 and where not in ("build", "probe", "capture"))
    ):
        return False
    Path("fault.part").write_text(str(time.monotonic()))
    Path("fault.part").rename("fault")
    return True


def fault(where: str) -> None:
    """Fail here, if it is due."""
    if not is_due(where):
        return
    if WHAT == "block":
        select.select([], [], [])
    if WHAT == "exit3":
        sys.exit(3)
    if WHAT == "os_exit":
        os._exit(4)
    if WHAT == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    raise KeyError(f"bad {where}")


class FailingGradient(torch.autograd.Function):
    """The identity; its backward can fail."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        fault("backward")
        return gradient


class Fragile(nn.Module):
    """Runs as it is, being opaque."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        fault("evaluate" if not self.training else "forward")
        return torch.tanh(FailingGradient.apply(self.linear(x)))


class Model(nn.Module):
    """Two fragile halves with a cut between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = Fragile(), Fragile()
        self.head = nn.Linear(8, 1)
        self.cut = varuna.CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        fault("capture")
        h = self.cut(self.first(x))
        return (self.head(self.second(h))[:, 0] - y).square().mean()


class Samples:
    """64 samples, any of which may fail."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if WHAT != "nan":
            fault("dataset")
        fault("probe")
        x = torch.linspace(0, index / 64, 8)
        if WHAT == "nan" and is_due("dataset"):
            x = x * float("nan")
        return x, x.sum()


def collate(samples: list[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
    fault("collate")
    return torch.stack([x for x, _ in samples]), torch.stack([y for _, y in samples])


def loss_weight(batch: tuple[Tensor, Tensor]) -> float:
    fault("loss_weight")
    return float(len(batch[0]))


class FailingSGD(torch.optim.SGD):
    def step(self, closure: Any = None) -> Any:
        fault("optimizer")
        return super().step(closure)


def main() -> None:
    fault("build")
    torch.manual_seed(0)
    model = Model()
    optimizer = FailingSGD(model.parameters(), lr=1e-3)
    job = varuna.Varuna(
        model,
        optimizer,
        Samples(),
        batch_size=BATCH_SIZE,
        collate_fn=collate,
        loss_weight=loss_weight if WHERE == "loss_weight" else None,
        opaque=["first", "second"],
        check=False,
    )
    for step in job.train(num_steps=10_000):
        progress["steps"] = step.index + 1
        Path(f"trains-{job.rank}").touch()
        if WHERE == "evaluate" or (WHAT == "evaluate" and is_due("loop")):
            job.evaluate(Samples())
        if WHAT == "leave" and is_due("loop"):
            return
        fault("loop")


main()
