"""Freezing and modes that change while a job runs are followed, as in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

import varuna
from tests.cases.jobs import run_workers
from tests.run.processes import WorkersFailed


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 4)
        self.cut = varuna.CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cut(self.norm(torch.tanh(self.first(x))))).pow(2).mean()


def build() -> Model:
    torch.manual_seed(0)
    return Model().double()


def change(model: Model, step_index: int) -> None:
    """Frozen from the start up to step 1; the norm in eval mode from step 2 on."""
    if step_index == 0:
        model.first.requires_grad_(False)
    if step_index == 1:
        model.first.requires_grad_(True)
    if step_index == 2:
        model.norm.eval()


def samples() -> Tensor:
    return torch.randn(20, 4, generator=torch.Generator().manual_seed(1), dtype=torch.float64)


def plain() -> dict[str, Tensor]:
    model, data = build(), samples()
    change(model, 0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for step in range(4):
        change(model, step)
        ids = varuna.sample_ids(step, 20, 8, 0)
        for first in range(0, 8, 2):
            (model(data[ids[first : first + 2]]) / 4).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def job_of(model: nn.Module, num_stages: int, dataset: Any = None) -> varuna.Varuna:
    return varuna.Varuna(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        samples() if dataset is None else dataset,
        batch_size=8,
        progress=False,
        device="cpu",
        layout=varuna.Layout(num_stages=num_stages, micro_batch_size=2),
    )


def body() -> dict[str, Tensor]:
    model = build()
    change(model, 0)
    job = job_of(model, num_stages=2)
    for step in job.train(4):
        change(model, step.index + 1)
    return job.full_state_dict()


def test_freezing_and_modes_are_followed() -> None:
    expected = plain()
    for num_workers in (2, 4):
        found = run_workers(num_workers, body)[0]
        for name, value in expected.items():
            torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=f"{name}, {num_workers}")


def switches_alone(num_stages: int, names: Sequence[str]) -> None:
    """Worker 1 freezes parameters, or puts modules in eval mode, and worker 0 does not."""
    model = build()
    job = job_of(model, num_stages)
    for step in job.train(3):
        if job.rank == 1 and step.index == 1:
            for name in names:
                module = dict(model.named_modules()).get(name)
                if module is None:
                    model.get_parameter(name).requires_grad_(False)
                else:
                    module.eval()


@pytest.mark.parametrize("num_stages", [1, 2])
@pytest.mark.parametrize(
    "names",
    [("last.bias",), ("first.weight",), ("norm",), tuple(name for name, _ in build().named_parameters())],
)
def test_what_one_worker_alone_switches_ends_the_job(num_stages: int, names: Sequence[str]) -> None:
    """Also if it holds nothing of it, and if nothing else is left that it shares with others."""
    with pytest.raises(WorkersFailed, match="requires_grad and modes must be the same on all"):
        run_workers(2, switches_alone, num_stages, names)


# --- other modes, other inputs ----------------------------------------------------------------


class Late(nn.Module):
    """Its middle reads a part of the batch in eval mode only."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.cuts[0](torch.tanh(self.first(x)))
        h = self.middle(h)
        if not self.middle.training:
            h = h + y
        return (self.last(self.cuts[1](h)) - y).pow(2).mean()


def pairs() -> TensorDataset:
    generator = torch.Generator().manual_seed(2)
    return TensorDataset(*(torch.randn(20, 4, generator=generator, dtype=torch.float64) for _ in range(2)))


def late() -> Late:
    torch.manual_seed(0)
    return Late().double()


def late_alone() -> tuple[dict[str, Tensor], list[float]]:
    model, (x, y) = late(), pairs().tensors
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    losses = []
    for step in range(4):
        model.train()
        model.middle.train(step < 2)
        ids = varuna.sample_ids(step, 20, 8, 0)
        model(x[ids], y[ids]).backward()
        optimizer.step()
        optimizer.zero_grad()
        model.eval()
        losses.append(model(x, y).item())
    return model.state_dict(), losses


def late_body() -> tuple[dict[str, Tensor], list[float]]:
    model = late()
    job = job_of(model, num_stages=3, dataset=pairs())
    losses = []
    for step in job.train(4):
        losses.append(job.evaluate(pairs()))
        if step.index == 1:
            model.middle.eval()
    return job.full_state_dict(), losses


def test_a_stage_may_need_the_batch_in_another_mode_only() -> None:
    expected, losses = late_alone()
    found, found_losses = run_workers(3, late_body)[0]
    torch.testing.assert_close(found_losses, losses, rtol=1e-12, atol=1e-12)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-12, atol=1e-12, msg=name)
