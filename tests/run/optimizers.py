"""Optimizers that tests try, the user's own included."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer


class Lion(Optimizer):
    """A user's own: sign of an interpolated momentum, state made at the first gradient."""

    def __init__(self, params: Iterable[Any], lr: float = 0.01, beta: float = 0.9) -> None:
        super().__init__(params, {"lr": lr, "beta": beta})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        for group in self.param_groups:
            for p in group["params"]:
                if p.grad is None:
                    continue
                momentum = self.state[p].setdefault("momentum", torch.zeros_like(p))
                p.sub_(group["lr"] * torch.lerp(p.grad, momentum, group["beta"]).sign())
                momentum.lerp_(p.grad, 1 - group["beta"])


def _of(cls: type[Optimizer], **options: Any) -> Callable[[Iterable[Any]], Optimizer]:
    return lambda parameters: cls(parameters, **options)


OPTIMIZERS: dict[str, Callable[[Iterable[Any]], Optimizer]] = {
    "adamw": _of(torch.optim.AdamW, lr=0.01),
    "adamw-foreach": _of(torch.optim.AdamW, lr=0.01, foreach=True),
    "adamw-fused": _of(torch.optim.AdamW, lr=0.01, fused=True),
    "adamw-amsgrad-tensor-lr": _of(torch.optim.AdamW, lr=torch.tensor(0.01), amsgrad=True),
    "adam-maximize": _of(torch.optim.Adam, lr=0.01, maximize=True),
    "sgd-nesterov": _of(torch.optim.SGD, lr=0.1, momentum=0.9, nesterov=True, weight_decay=0.1),
    "sgd-fused": _of(torch.optim.SGD, lr=0.1, momentum=0.9, fused=True),
    "adafactor": _of(torch.optim.Adafactor, lr=0.01),
    "rmsprop": _of(torch.optim.RMSprop, lr=0.01, momentum=0.5, centered=True),
    "adagrad": _of(torch.optim.Adagrad, lr=0.1, initial_accumulator_value=0.25),
    "adagrad-fused": _of(torch.optim.Adagrad, lr=0.1, fused=True),
    "adadelta": _of(torch.optim.Adadelta),
    "adamax": _of(torch.optim.Adamax),
    "asgd": _of(torch.optim.ASGD),
    "nadam": _of(torch.optim.NAdam),
    "radam": _of(torch.optim.RAdam),
    "rprop": _of(torch.optim.Rprop),
    "lion": _of(Lion),
}


def groups_of(model: nn.Module) -> list[dict[str, Any]]:
    """Two param groups with different options, each spanning the layers."""
    named = dict(model.named_parameters())
    return [
        {"params": [p for n, p in named.items() if n.endswith("weight")]},
        {"params": [p for n, p in named.items() if n.endswith("bias")], "lr": 0.003},
    ]
