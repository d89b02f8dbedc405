"""A model around a body whose gradients are compared."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Scaled(nn.Module):
    """``body`` between a scale, whose gradient needs that of the body's input, and a loss."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.body = body

    def forward(self, x: Tensor) -> Tensor:
        out = self.body(x * self.scale if x.is_floating_point() else x)
        return out.sin().square().mean()
