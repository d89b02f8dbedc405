"""A loss function beside the model: ``loss_fn(model(inputs), targets)`` as the model's own forward."""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from torch import nn

from varuna.errors import LossError

LossFunction = Callable[..., Any]


@contextlib.contextmanager
def forward_with_loss(model: nn.Module, loss_fn: LossFunction | None) -> Iterator[None]:
    """Inside, calling the model with a whole batch returns ``loss_fn(output, *rest)``; names do not change.

    The model takes what its forward asks for: by name from a dict; from a list or tuple as many leading items
        as it has
    arguments without a default (at least one). The rest goes to ``loss_fn`` by position, in the batch's order.

    Raises:
        LossError: ``loss_fn`` has trainable parameters of its own.
    """
    if loss_fn is None:
        yield
        return
    _refuse_parameters(loss_fn)
    own_forward = model.__dict__.get("forward")
    forward = model.forward

    def with_loss(*args: Any, **kwargs: Any) -> Any:
        taken, named, rest = divide_batch(forward, args, kwargs)
        return loss_fn(forward(*taken, **named), *rest)

    model.__dict__["forward"] = with_loss
    try:
        yield
    finally:
        del model.__dict__["forward"]
        if own_forward is not None:
            model.__dict__["forward"] = own_forward


def divide_batch(
    forward: Callable[..., Any], args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any], tuple[Any, ...]]:
    """Arguments for the model by position, by name, and what is left for the loss function."""
    parameters = inspect.signature(forward).parameters.values()
    by_position = [p for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    num_taken = max(1, sum(p.default is p.empty for p in by_position))
    names = {p.name for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    taken = args[:num_taken]
    named = {name: value for name, value in kwargs.items() if name in names}
    left = (value for name, value in kwargs.items() if name not in names)
    return taken, named, (*args[num_taken:], *left)


def describe_loss_fn(loss_fn: LossFunction | None) -> str:
    """Tells functions of one source file apart, lambdas on one line too; part of the key of a kept capture."""
    code = getattr(loss_fn, "__code__", None)
    if code is None:
        return type(loss_fn).__qualname__
    return f"{code.co_qualname} {list(code.co_positions())} {code.co_code.hex()}"


def _refuse_parameters(loss_fn: LossFunction) -> None:
    names = [name for name, _ in loss_fn.named_parameters()] if isinstance(loss_fn, nn.Module) else []
    if names:
        raise LossError(
            f"loss_fn has parameters of its own ({', '.join(names[:4])}), which no section would hold. Make "
            f"loss_fn a "
            "submodule of the model and return the loss from the model's forward."
        )
