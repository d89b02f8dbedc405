"""The job of ``bench_goodput``: a model of four blocks that sleep as long as a device would compute.

    varuna run -w 6 -p 2 -b 1 -m benchmarks.sleeping_job

Everything else is real: parameters, activations, reductions, updates. So six workers fit on two cores.
"""

from __future__ import annotations

import argparse
from typing import Any

import torch
from torch import Tensor, nn

import varuna
from varuna.testing.emulated import compute_for

BLOCKS, WIDTH = 4, 64
FORWARD_S, BACKWARD_S = 0.015, 0.030  # of a block, for one micro-batch
_NUM_SAMPLES = 4096


class _Nap(torch.autograd.Function):
    """The identity, which takes its time both ways."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """Sleep, then give what came."""
        compute_for(FORWARD_S)
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:  # type: ignore[override]
        """The same with gradients."""
        compute_for(BACKWARD_S)
        return gradient


class Nap(nn.Module):
    """A leaf that the capture does not look into."""

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` to the same."""
        return _Nap.apply(x)


class Sleeper(nn.Module):
    """Blocks of a linear layer and a nap, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(BLOCKS))
        self.naps = nn.ModuleList(Nap() for _ in range(BLOCKS))
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(BLOCKS - 1))

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, width]`` to a scalar."""
        for index, (layer, nap) in enumerate(zip(self.layers, self.naps, strict=True)):
            x = nap(layer(x))
            if index < BLOCKS - 1:
                x = self.cuts[index](x)
        return x.square().mean()


class Noise(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random vectors, in memory."""

    def __init__(self) -> None:
        self.x = torch.randn(_NUM_SAMPLES, WIDTH, generator=torch.Generator().manual_seed(0))

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One vector."""
        return {"x": self.x[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch-size", type=int, default=24)
    parser.add_argument("--steps", type=int, default=1_000_000)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = Sleeper()
    job = varuna.Varuna(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-4),
        Noise(),
        batch_size=options.batch_size,
        opaque=[f"naps.{index}" for index in range(BLOCKS)],
        progress=False,
    )
    for _ in job.train(options.steps):
        pass


if __name__ == "__main__":
    main()
