"""Trains a small model of three sections for a few steps, and says on which layout."""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn

import varuna

WIDTH = 64


class Chain(nn.Module):
    """Three layers with dropout, a mark between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cut_1, self.cut_2, self.dropout = varuna.CutPoint(), varuna.CutPoint(), nn.Dropout(0.1)

    def forward(self, x: Tensor) -> Tensor:
        """``[samples, width]`` to a scalar."""
        x = self.cut_1(self.dropout(self.first(x)).relu())
        return self.third(self.cut_2(self.second(x).relu())).square().mean()


def main() -> None:
    """Run."""
    torch.manual_seed(0)
    model = Chain()
    generator = torch.Generator().manual_seed(1)
    data = torch.utils.data.TensorDataset(torch.randn(64, WIDTH, generator=generator))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job = varuna.Varuna(model, optimizer, data, batch_size=16)
    try:
        for step in job.train(int(sys.argv[1])):
            print(f"step {step.index} {step.loss:.9f}")
    except Exception as error:
        print(f"a user's handler took {error!r}")
    plan = job.plan
    print(f"{len(plan.pipelines)} x {len(plan.pipelines[0].stages)} x {plan.micro_batch_size}")


main()
