"""Checks of what the user passes to ``Varuna``, one argument at a time: values in, values or an error out."""

from __future__ import annotations

import math
from collections.abc import Iterable
from numbers import Integral, Real

from torch.optim import Optimizer

from varuna.config import LayoutConfig
from varuna.errors import ConfigError, OptimizerError


def whole_number(name: str, value: object, what: str, *, minimum: int) -> int:
    """``value`` as an int. Raises ConfigError unless it is a whole number from ``minimum``; True is none."""
    if isinstance(value, bool) or not isinstance(value, Integral) or value < minimum:
        raise ConfigError(f"{name}={value!r}; it must be {what}, at least {minimum}.")
    return int(value)


def checked_batch_size(batch_size: object) -> int:
    """Samples in a batch, at least 1."""
    return whole_number("batch_size", batch_size, "a whole number of samples", minimum=1)


def checked_num_steps(num_steps: object) -> int:
    """Steps to train, 0 or more."""
    return whole_number("num_steps", num_steps, "a whole number of steps", minimum=0)


def checked_seed(seed: object) -> int:
    """The seed of a job, 0 or more."""
    return whole_number("seed", seed, "a whole number", minimum=0)


def checked_clip(clip_grad_norm: object) -> float | None:
    """The largest gradient norm, above 0, or None."""
    if clip_grad_norm is None:
        return None
    is_number = isinstance(clip_grad_norm, Real) and not isinstance(clip_grad_norm, bool)
    if not is_number or not float(clip_grad_norm) > 0 or math.isinf(float(clip_grad_norm)):  # type: ignore[arg-type]
        raise ConfigError(
            f"clip_grad_norm={clip_grad_norm!r}; it must be a number above 0, or None for no clipping."
        )
    return float(clip_grad_norm)  # type: ignore[arg-type]


def check_callables(**functions: object) -> None:
    """Raise ConfigError if one of the named functions is neither None nor callable."""
    for name, function in functions.items():
        if function is not None and not callable(function):
            raise ConfigError(f"{name}={function!r}; it must be a function, or None.")


def check_names(**lists: object) -> None:
    """Raise ConfigError if one of the named lists of module names is a single string, or holds no strings."""
    for argument, names in lists.items():
        if names is None:
            continue
        if (
            isinstance(names, str)
            or not isinstance(names, Iterable)
            or not all(isinstance(n, str) for n in names)
        ):
            raise ConfigError(f"{argument}={names!r}; it must be a list of module names, e.g. ['layers.3'].")


def check_layout(layout: object) -> None:
    """Raise ConfigError if it is not a ``Layout``."""
    if layout is not None and not isinstance(layout, LayoutConfig):
        raise ConfigError(
            f"layout={layout!r}; it must be a varuna.Layout, e.g. varuna.Layout(num_stages=2), or None."
        )


def check_scheduler(lr_scheduler: object, optimizer: Optimizer) -> None:
    """Raise ConfigError if it cannot be stepped, OptimizerError if it drives another optimizer."""
    if lr_scheduler is None:
        return
    if not callable(getattr(lr_scheduler, "step", None)):
        raise ConfigError(
            f"lr_scheduler={lr_scheduler!r} has no step(); pass a torch.optim.lr_scheduler object, or None."
        )
    driven = getattr(lr_scheduler, "optimizer", None)
    if not isinstance(driven, Optimizer):
        return
    ours = {id(group) for group in optimizer.param_groups}
    if not any(id(group) in ours for group in driven.param_groups):
        raise OptimizerError(
            f"The learning rate scheduler ({type(lr_scheduler).__name__}) was made for another optimizer than "
            f"the one that is passed here, so it would change nothing. Make it from this optimizer."
        )
