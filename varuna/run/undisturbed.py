"""Running the user's model on the side, so that nothing of it shows afterwards."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from varuna.partition import Section
from varuna.partition.materialise import InitWeights, materialise, set_storage
from varuna.partition.program import buffer_slot, preserved
from varuna.run.fetch import preserved_globals
from varuna.run.random import preserved_generators

_BOOKS = frozenset({"_parameters", "_buffers", "_modules"})


@contextlib.contextmanager
def undisturbed(model: nn.Module, device: torch.device) -> Iterator[None]:
    """Inside, parameters have no gradients at first and buffers are copies.

    Afterwards gradients, buffers, the random generators of torch, NumPy and Python, and plain attributes of
    modules are as before (an attribute that is a list or another object is put back, not what is in it).
    Weights are not protected: run no optimizer on them.
    """
    parameters = list(model.parameters())
    gradients = [parameter.grad for parameter in parameters]
    attributes = [(module, _plain(module)) for module in model.modules()]
    slots = [buffer_slot(model, name) for name, _ in model.named_buffers(remove_duplicate=False)]
    drop_gradients(parameters)
    try:
        with preserved_globals(), preserved_generators(device), preserved(slots):
            yield
    finally:
        for parameter, gradient in zip(parameters, gradients, strict=True):
            parameter.grad = gradient
        for module, before in attributes:
            for name in _plain(module).keys() - before.keys():
                del vars(module)[name]
            vars(module).update(before)


def drop_gradients(parameters: Sequence[nn.Parameter]) -> None:
    """Set every gradient to None."""
    for parameter in parameters:
        parameter.grad = None


@contextlib.contextmanager
def placed(
    model: nn.Module, section: Section, device: torch.device, seed: int, init_weights: InitWeights | None
) -> Iterator[None]:
    """Inside, one section's parameters and buffers are on the device; afterwards they are where they were.

    Those on the meta device get their initial values, and lose them again.
    """
    tensors = {**section.parameters, **section.buffers}
    before = {name: tensor.detach() for name, tensor in tensors.items()}
    materialise(model, list(tensors), seed=seed, device=device, init_weights=init_weights)
    try:
        yield
    finally:
        for name, tensor in tensors.items():
            if tensor.device != before[name].device:
                set_storage(tensor, before[name])


def _plain(module: nn.Module) -> dict[str, Any]:
    return {name: value for name, value in vars(module).items() if name not in _BOOKS}
