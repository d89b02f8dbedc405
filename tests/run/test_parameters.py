"""Parameters gain and lose storage in place with their optimizer state; nothing the user holds goes stale."""

from __future__ import annotations

import copy
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.run.optimizers import OPTIMIZERS, groups_of
from varuna.errors import OptimizerError, RunError
from varuna.run.parameters import ParameterHolding

FIRST = ("0.weight", "0.bias")
SECOND = ("1.weight", "1.bias")


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2)).double()


def step(user_model: nn.Module, optimizer: Optimizer, index: int) -> None:
    """One update with made-up gradients of what is held; everything else has gradient None."""
    for name, parameter in user_model.named_parameters():
        generator = torch.Generator().manual_seed(1000 * index + sum(name.encode()))
        gradient = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        parameter.grad = gradient if parameter.device.type == "cpu" else None
    optimizer.step()
    for parameter in user_model.parameters():
        parameter.grad = None


def plain(name: str, num_steps: int) -> dict[str, torch.Tensor]:
    user_model = model()
    optimizer = OPTIMIZERS[name](groups_of(user_model))
    for index in range(num_steps):
        step(user_model, optimizer, index)
    return {n: p.detach() for n, p in user_model.named_parameters()}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_part_trains_as_in_the_whole(name: str) -> None:
    """Half kept of a model built on the CPU, the other half given to one built on meta."""
    expected = plain(name, 3)
    kept = model()
    kept_optimizer = OPTIMIZERS[name](groups_of(kept))
    ParameterHolding(kept, kept_optimizer).keep_only(FIRST)

    given = model().to("meta")
    given_optimizer = OPTIMIZERS[name](groups_of(given))
    values = {n: p.detach().clone() for n, p in model().named_parameters() if n in SECOND}
    holding = ParameterHolding(given, given_optimizer)
    assert holding.held == {}
    holding.hold(values)
    assert tuple(holding.held) == SECOND

    for index in range(3):
        step(kept, kept_optimizer, index)
        step(given, given_optimizer, index)
    for parameter_name in FIRST:
        assert torch.equal(kept.get_parameter(parameter_name), expected[parameter_name])
    for parameter_name in SECOND:
        assert torch.equal(given.get_parameter(parameter_name), expected[parameter_name])


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_part_moves_with_its_state_and_goes_on(name: str) -> None:
    expected = plain(name, 4)
    models = [model(), model()]
    optimizers = [OPTIMIZERS[name](groups_of(user_model)) for user_model in models]
    holdings = [ParameterHolding(m, o) for m, o in zip(models, optimizers, strict=True)]
    holdings[0].keep_only(FIRST)
    holdings[1].keep_only(SECOND)
    for index in range(2):
        for user_model, optimizer in zip(models, optimizers, strict=True):
            step(user_model, optimizer, index)
    values = {n: holdings[0].held[n].detach().clone() for n in FIRST}
    states = {n: copy.deepcopy(holdings[0].state_of(n)) for n in FIRST}
    holdings[0].release(FIRST)
    assert holdings[0].held == {}
    assert len(optimizers[0].state) == 0
    holdings[1].hold(values, states)
    for index in range(2, 4):
        for user_model, optimizer in zip(models, optimizers, strict=True):
            step(user_model, optimizer, index)
    for parameter_name, value in expected.items():
        assert torch.equal(models[1].get_parameter(parameter_name), value)


def test_identity_groups_schedule_and_attributes_stay() -> None:
    user_model = model()
    weight = user_model[0].weight
    weight.requires_grad_(False)
    weight.note = "mine"
    optimizer = torch.optim.AdamW(groups_of(user_model))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5)
    holding = ParameterHolding(user_model, optimizer)
    before = weight.detach().clone()
    holding.release(FIRST)
    assert weight.device.type == "meta"
    assert weight.shape == (4, 3)
    assert not weight.requires_grad
    step(user_model, optimizer, 0)
    scheduler.step()
    holding.hold({"0.weight": before})
    assert user_model[0].weight is weight is optimizer.param_groups[0]["params"][0]
    assert torch.equal(weight, before)
    assert weight.note == "mine"
    assert not weight.requires_grad
    assert user_model[0].bias.requires_grad
    assert optimizer.param_groups[0]["lr"] == 0.0005


def test_ties_stay() -> None:
    user_model = nn.Sequential(nn.Embedding(5, 3), nn.Linear(3, 5, bias=False))
    user_model[1].weight = user_model[0].weight
    holding = ParameterHolding(user_model, None)
    value = user_model[0].weight.detach().clone()
    holding.release(["0.weight"])
    holding.hold({"0.weight": value})
    assert user_model[1].weight is user_model[0].weight
    assert torch.equal(user_model[1].weight, value)


class Marked(nn.Parameter):
    """A user's own kind of parameter."""


def test_a_subclass_of_parameter_stays_one() -> None:
    user_model = nn.Linear(2, 2)
    user_model.weight = Marked(torch.ones(2, 2))
    holding = ParameterHolding(user_model, None)
    holding.release(["weight"])
    assert type(user_model.weight) is Marked
    holding.hold({"weight": torch.zeros(2, 2)})
    assert type(user_model.weight) is Marked
    assert user_model.weight.sum() == 0


def test_backward_works_after_a_swap() -> None:
    user_model = model()
    holding = ParameterHolding(user_model, None)
    value = user_model[0].weight.detach().clone()
    user_model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    expected = user_model[0].weight.grad.clone()
    holding.release(["0.weight"])
    holding.hold({"0.weight": value})
    assert user_model[0].weight.grad is None
    user_model(torch.ones(1, 3, dtype=torch.float64)).sum().backward()
    assert torch.equal(user_model[0].weight.grad, expected)


def test_something_that_still_refers_to_the_storage_is_named() -> None:
    user_model = model()
    kept = user_model(torch.ones(1, 3, dtype=torch.float64))
    with pytest.raises(RunError, match=r"'1.weight' cannot change its storage.*Drop losses"):
        ParameterHolding(user_model, None).release(["1.weight"])
    del kept
    ParameterHolding(user_model, None).release(["1.weight"])


def test_memory_is_returned() -> None:
    """In a process of its own: what the allocator gives back depends on all that was freed before."""
    done = subprocess.run(
        [sys.executable, "-c", RELEASE], capture_output=True, text=True, check=True, timeout=120
    )
    released, size = map(int, done.stdout.split())
    assert released > 0.95 * 4 * size * 3 / 4  # weight, gradient, two moments


RELEASE = """
import psutil
import torch
from torch import nn
from varuna.run.parameters import ParameterHolding

model = nn.Sequential(*(nn.Linear(2000, 2000, bias=False) for _ in range(4)))
optimizer = torch.optim.AdamW(model.parameters())
holding = ParameterHolding(model, optimizer)
for parameter in model.parameters():
    parameter.grad = torch.ones_like(parameter)
optimizer.step()
process = psutil.Process()
before = process.memory_info().rss
holding.release(["1.weight", "2.weight", "3.weight"])
print(before - process.memory_info().rss, sum(parameter.nbytes for parameter in model.parameters()))
"""


class StubbornState(Optimizer):
    """Makes state in its constructor and has an argument its groups do not keep."""

    def __init__(self, params: Any, table: dict[str, float]) -> None:
        super().__init__(params, {"lr": table["lr"]})
        for group in self.param_groups:
            for p in group["params"]:
                self.state[p]["sum"] = torch.zeros_like(p)

    def step(self, closure: Any = None) -> None: ...


def test_constructor_state_that_cannot_be_made_again_is_an_error() -> None:
    user_model = model().to("meta")
    optimizer = StubbornState(user_model.parameters(), {"lr": 0.1})
    holding = ParameterHolding(user_model, optimizer)
    with pytest.raises(OptimizerError, match="StubbornState makes state in its constructor"):
        holding.hold({"0.bias": torch.zeros(4, dtype=torch.float64)})


def test_adopt_gives_state_to_what_was_materialised_elsewhere() -> None:
    user_model = model().to("meta")
    optimizer = OPTIMIZERS["adagrad"](user_model.parameters())
    holding = ParameterHolding(user_model, optimizer)
    value = nn.Parameter(torch.ones(4, dtype=torch.float64))
    torch.utils.swap_tensors(user_model[0].bias, value)
    holding.adopt(["0.bias"])
    assert optimizer.state[user_model[0].bias]["sum"].tolist() == [0.25] * 4
