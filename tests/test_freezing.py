"""Freezing and modes that change while a job runs are followed, as in a plain loop."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor, nn

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


def job_of(model: Model, num_stages: int) -> varuna.Varuna:
    return varuna.Varuna(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        samples(),
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


def freezes_alone(names: Sequence[str]) -> None:
    model = build()
    job = job_of(model, num_stages=1)
    for step in job.train(3):
        if job.rank == 1 and step.index == 1:
            for name in names:
                model.get_parameter(name).requires_grad_(False)


@pytest.mark.parametrize("names", [("last.bias",), tuple(name for name, _ in build().named_parameters())])
def test_what_is_frozen_on_one_worker_only_ends_the_job(names: Sequence[str]) -> None:
    """Also if it is all that it shares with the others: these would wait for its gradients for ever."""
    with pytest.raises(WorkersFailed, match="requires_grad must be the same on every worker"):
        run_workers(2, freezes_alone, names)
