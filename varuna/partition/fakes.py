"""Runs the user's model without memory: its parameters and buffers are swapped for shapes while it is captured.

Whatever the model was built on (CPU, the meta device, a mix), every tensor in it claims the same device during
capture, so that the graph does not depend on how the model was built. Afterwards the user's own objects are
back in their places.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from varuna.partition.signature import InputSignature


@contextmanager
def fake_tensors(model: nn.Module, mode: FakeTensorMode, device: str) -> Iterator[dict[str, Tensor]]:
    """Inside: every registered tensor of ``model`` is a fake on ``device``. Gives the real ones by name."""
    originals: list[tuple[dict[str, Tensor | None], str, Tensor]] = []
    by_name: dict[str, Tensor] = {}
    fakes: dict[int, Tensor] = {}
    try:
        for path, module in model.named_modules(remove_duplicate=False):
            for registered in (module._parameters, module._buffers):
                for name, value in registered.items():
                    if value is None:
                        continue
                    by_name[f"{path}.{name}" if path else name] = value
                    if isinstance(value, FakeTensor):
                        continue  # a module reached by a second path
                    if id(value) not in fakes:
                        fakes[id(value)] = make_fake(value, mode, device)
                    originals.append((registered, name, value))
                    registered[name] = fakes[id(value)]
        yield by_name
    finally:
        for registered, name, value in originals:
            registered[name] = value


def make_fake(value: Tensor, mode: FakeTensorMode, device: str) -> Tensor:
    """A tensor of the same shape, strides, dtype and kind that has no storage and claims ``device``."""
    shape = torch.empty_strided(value.size(), value.stride(), dtype=value.dtype, device="meta")
    fake = FakeTensor(mode, shape, torch.device(device))
    if isinstance(value, nn.Parameter):
        return nn.Parameter(fake, requires_grad=value.requires_grad)
    return fake


def fake_inputs(signature: InputSignature, num_samples: int, mode: FakeTensorMode, device: str) -> list[Tensor]:
    """One fake for every tensor of the batch, in the signature's order."""
    return [
        make_fake(
            torch.empty(spec.full_shape(num_samples), dtype=spec.torch_dtype, device="meta"), mode, device
        )
        for spec in signature.tensors
    ]


@contextmanager
def training_mode(model: nn.Module, training: bool) -> Iterator[None]:
    """Inside: the model is in train or eval mode. Afterwards every module has its own flag again.

    A model that is in train mode already keeps its modules' flags, so that parts the user put in eval mode
    (frozen batch norms) stay there.
    """
    flags = [(module, module.training) for module in model.modules()]
    try:
        if not training:
            model.eval()
        elif not model.training:
            model.train()
        yield
    finally:
        for module, flag in flags:
            module.training = flag
