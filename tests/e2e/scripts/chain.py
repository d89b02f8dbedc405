"""Trains a chain that cannot be captured; ``loss_fn`` fails on worker ``sys.argv[1]`` in its second step."""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path

import torch
from torch import Tensor, nn

import varuna

IS_MINE = os.environ.get("RANK") == sys.argv[1]
step_index = 0


class Branch(nn.Module):
    """Decides by value."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) if x.sum() > 0 else -self.linear(x)


def loss_fn(output: Tensor, y: Tensor) -> Tensor:
    if IS_MINE and step_index == 1:
        Path("fault").write_text(str(time.monotonic()))
        raise KeyError("bad loss_fn")
    if float(y.sum()) > 1e9:  # cannot be captured, so that it runs as it is
        return output.sum()
    return (output.mean(1) - y).square().mean()


torch.manual_seed(0)
model = [Branch() for _ in range(4)]
samples = [(torch.linspace(0, index / 64, 8), torch.tensor(index / 8)) for index in range(64)]
parameters = [parameter for part in model for parameter in part.parameters()]
job = varuna.Varuna(model, torch.optim.SGD(parameters, lr=1e-3), samples, batch_size=8, loss_fn=loss_fn)
for step in job.train(num_steps=10_000):
    step_index = step.index + 1
