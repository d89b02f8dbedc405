"""What an optimizer must be like, and that those of torch.optim work with parameters that live elsewhere."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from tests.run.optimizers import OPTIMIZERS, groups_of
from varuna.errors import OptimizerError
from varuna.run.optimizer import check_optimizer, learning_rates


def model() -> nn.Sequential:
    torch.manual_seed(1)
    return nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))


class NeedsClosure(Optimizer):
    def __init__(self, params: Any) -> None:
        super().__init__(params, {"lr": 0.1})

    def step(self, closure: Callable[[], float]) -> float:  # type: ignore[override]
        return closure()


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_optimizers_of_torch_and_of_users_are_accepted(name: str) -> None:
    user_model = model()
    check_optimizer(OPTIMIZERS[name](groups_of(user_model)), user_model)


def test_an_optimizer_that_a_scheduler_has_wrapped_is_accepted() -> None:
    user_model = model()
    optimizer = torch.optim.AdamW(user_model.parameters())
    torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    check_optimizer(optimizer, user_model)


@pytest.mark.parametrize("cls", [torch.optim.LBFGS, NeedsClosure])
def test_a_step_that_needs_a_closure_is_refused(cls: type[Optimizer]) -> None:
    user_model = model()
    with pytest.raises(OptimizerError, match=rf"{cls.__name__}.step needs a closure.*AdamW"):
        check_optimizer(cls(user_model.parameters()), user_model)


def test_sparse_adam_is_refused() -> None:
    user_model = model()
    with pytest.raises(OptimizerError, match="sparse"):
        check_optimizer(torch.optim.SparseAdam(list(user_model.parameters())), user_model)


def test_something_that_is_no_optimizer() -> None:
    with pytest.raises(OptimizerError, match=r"is a type, not a torch\.optim\.Optimizer"):
        check_optimizer(torch.optim.AdamW, model())


def test_a_parameter_of_another_model_is_named_by_group_and_shape() -> None:
    user_model = model()
    groups = [{"params": list(user_model[0].parameters())}, {"params": list(model()[1].parameters())}]
    with pytest.raises(OptimizerError, match=r"Parameter 0 \(shape \[2, 4\]\) of the optimizer's group 1"):
        check_optimizer(torch.optim.SGD(groups), user_model)


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate")
def test_a_parameter_listed_twice() -> None:
    user_model = model()
    weight = user_model[0].weight
    with pytest.raises(OptimizerError, match="twice"):
        check_optimizer(torch.optim.SGD([weight, weight]), user_model)


def test_parameters_that_no_group_has_are_allowed() -> None:
    user_model = model()
    check_optimizer(torch.optim.SGD(user_model[1].parameters()), user_model)


def test_learning_rates_of_each_group() -> None:
    user_model = model()
    groups = groups_of(user_model)
    assert learning_rates(torch.optim.AdamW(groups, lr=torch.tensor(0.5))) == (0.5, 0.003)
