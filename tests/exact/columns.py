"""Random inputs of the exactness tests: one tensor of ``[NUM_SAMPLES, ...]`` per input."""

from __future__ import annotations

import torch
from torch import Tensor

NUM_SAMPLES = 64
TIME = 12


def random_tokens(vocab: int, *, time: int = TIME, low: int = 3) -> Tensor:
    return torch.randint(low, vocab, (NUM_SAMPLES, time))


def ragged_mask(time: int = TIME) -> Tensor:
    """``[NUM_SAMPLES, time]``: each sample has between half and all of its positions."""
    lengths = torch.randint(time // 2, time + 1, (NUM_SAMPLES, 1))
    return torch.arange(time) < lengths


def some_ignored(labels: Tensor) -> Tensor:
    ignored = torch.rand(labels.shape) < 0.3
    ignored[:, 1] = False
    return labels.masked_fill(ignored, -100)
