"""``torch.autograd.Function`` inside forward: the exporter would trace through it and lose its backward in
silence.

So while the model is captured such a call stops capture, and the module around it becomes an opaque leaf. Two
kinds go
on: torch's own (they are part of operators), and ``torch.utils.checkpoint`` (its function is simply called;
what is to be recomputed is Varuna's choice).
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch.autograd import Function
from torch.utils.checkpoint import CheckpointFunction

_APPLY = Function.__dict__["apply"]


class CustomGradientError(Exception):
    """Forward calls a ``torch.autograd.Function`` of the user's."""


@contextmanager
def custom_gradients_stop() -> Iterator[None]:
    """Inside: applying an autograd function of the user's raises ``CustomGradientError``."""
    owner = threading.get_ident()
    original = Function.__dict__["apply"]

    def apply(cls: type[Function], *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != owner:
            return original.__get__(None, cls)(*args, **kwargs)
        if issubclass(cls, CheckpointFunction):
            run_function, _preserve_rng_state, *inputs = args
            return run_function(*inputs)
        if not cls.__module__.startswith("torch."):
            raise CustomGradientError(
                f"{cls.__module__}.{cls.__qualname__} is a torch.autograd.Function, whose backward a graph "
                f"cannot hold"
            )
        return original.__get__(None, cls)(*args, **kwargs)

    with _applied_by(classmethod(apply)):
        yield


@contextmanager
def custom_gradients_run() -> Iterator[None]:
    """Inside: they work as always again, for running a leaf during capture."""
    with _applied_by(_APPLY):
        yield


@contextmanager
def _applied_by(apply: Any) -> Iterator[None]:
    before = Function.__dict__["apply"]
    Function.apply = apply  # type: ignore[method-assign]
    try:
        yield
    finally:
        Function.apply = before  # type: ignore[method-assign]
