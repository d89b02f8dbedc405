"""What a graph cannot show is refused while it is captured; what only looks so is not."""

from __future__ import annotations

import os
import random
from typing import NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from varuna.errors import CaptureError
from varuna.partition import partition
from varuna.partition.check import check_split
from varuna.partition.signature import signature_of
from varuna.partition.store import capture_key


class Averaging(nn.Module):
    def __init__(self, *, in_place: bool) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.register_buffer("mean", torch.zeros(3))
        self.in_place = in_place

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if self.in_place:
            self.mean.mul_(0.5).add_(h.detach().mean(0))
        else:
            self.mean = 0.5 * self.mean + h.detach().mean(0)
        return (h - self.mean).pow(2).mean()


def test_a_buffer_that_is_assigned_anew_is_refused() -> None:
    with pytest.raises(CaptureError, match=r"assigns a new tensor to the buffer 'mean'.*self\.mean\.copy_"):
        partition(Averaging(in_place=False), torch.zeros(2, 3))
    assert partition(Averaging(in_place=True), torch.zeros(2, 3)).sections[-1].mutated_buffers


class Drawing(nn.Module):
    def __init__(self, source: str) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.source = source

    def forward(self, x: Tensor) -> Tensor:
        draw = {"random": random.random, "numpy": np.random.rand, "none": float}[self.source]
        return self.linear(x).pow(2).mean() * (1 + draw())


@pytest.mark.parametrize("source", ["random", "numpy"])
def test_random_numbers_that_are_not_torchs_are_refused(source: str) -> None:
    with pytest.raises(CaptureError, match=r"Python's random or numpy\.random"):
        partition(Drawing(source), torch.zeros(2, 3))
    assert partition(Drawing("none"), torch.zeros(2, 3)).sections


class ReadsEnvironment(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).mean() * float(os.environ.get("SCALE", "1"))


def test_forward_that_reads_the_environment_is_not_cached() -> None:
    assert capture_key(ReadsEnvironment(), signature_of(torch.zeros(2, 3)), True, None) is None


class ChangesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        x += 1
        return self.linear(x).pow(2).mean()


def test_the_check_gives_both_runs_the_same_batch() -> None:
    model, batch = ChangesItsInput().double(), torch.ones(2, 3, dtype=torch.float64)
    assert check_split(model, partition(model, batch.clone()), batch) < 1e-12
    assert torch.equal(batch, torch.ones(2, 3, dtype=torch.float64))


class Pair(NamedTuple):
    x: Tensor
    y: Tensor


class TakesTwo(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return (self.linear(x) - y).pow(2).mean()


def test_a_named_tuple_is_given_as_positional_arguments() -> None:
    divided = partition(TakesTwo(), Pair(torch.zeros(2, 3), torch.zeros(2, 3)))
    assert {key for section in divided.sections for key in section.input_keys} == {"x", "y"}
