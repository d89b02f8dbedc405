"""A capture's key follows what forward reaches beside its own source: closures, globals, class members."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

from varuna.partition.signature import signature_of
from varuna.partition.store import capture_key

FACTOR = 2.0


def helper(x: Tensor) -> Tensor:
    return x * FACTOR


@dataclass(frozen=True)
class Config:
    """Its generated methods have no source file."""

    scale: float = 1.0


class Configured(nn.Module):
    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config

    def forward(self, x: Tensor) -> Tensor:
        return x.mean() * self.config.scale


def test_models_with_a_dataclass_of_settings_have_keys() -> None:
    assert key(Configured(Config())) == key(Configured(Config()))
    assert key(Configured(Config())) != key(Configured(Config(scale=2.0)))


class Reaching(nn.Module):
    power = 2

    def forward(self, x: Tensor) -> Tensor:
        return helper(x).pow(self.power).mean()


def made_by(function: Callable[[Tensor], Tensor]) -> nn.Module:
    class Made(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return function(x).mean()

    return Made()


def key(model: nn.Module) -> str:
    found = capture_key(model, signature_of(torch.zeros(2, 3)), True, None)
    assert found is not None
    return found


def test_a_class_made_over_another_function_has_another_key() -> None:
    double, triple = functools.partial(torch.mul, other=2), functools.partial(torch.mul, other=3)
    assert key(made_by(double)) == key(made_by(double))
    assert key(made_by(double)) != key(made_by(triple))
    assert key(made_by(lambda x: x * 2)) != key(made_by(lambda x: x * 3))


def test_a_changed_global_of_a_helper_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Reaching())
    monkeypatch.setitem(globals(), "FACTOR", 3.0)
    assert key(Reaching()) != before


def test_a_changed_class_attribute_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Reaching())
    monkeypatch.setattr(Reaching, "power", 3)
    assert key(Reaching()) != before


def test_a_replaced_method_changes_the_key(monkeypatch: pytest.MonkeyPatch) -> None:
    before = key(Reaching())
    monkeypatch.setattr(Reaching, "forward", lambda self, x: x.mean())
    assert key(Reaching()) != before
