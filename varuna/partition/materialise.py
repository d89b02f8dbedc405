"""Parameters and buffers on the meta device get storage and values in place; others lose theirs in place.

No worker holds the whole model. A model built under ``torch.device("meta")`` is given values tensor by tensor,
as running its constructor and initialisation would, but each module that owns a tensor starts from random
numbers keyed by (seed, name of the module): the values do not depend on which sections are here or on the
order.

In place means that the ``Parameter`` objects stay: the optimizer, ties and the user's references remain valid.
"""

from __future__ import annotations

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterable
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from varuna.errors import UserError
from varuna.partition.initialise import Initialiser
from varuna.partition.ties import canonical_names

InitWeights = Callable[[nn.Module], object]


def materialise(
    model: nn.Module,
    names: Iterable[str],
    *,
    seed: int,
    device: torch.device | str,
    init_weights: InitWeights | None = None,
) -> None:
    """Gives the named parameters and buffers storage on ``device``; those on the meta device also values.

    Values come from the constructor's ``reset_parameters()`` of the module that owns them and then, like
    ``model.apply`` would, from ``init_weights(module)``; without it from the model's own
    ``_init_weights(module)`` if it has one (Hugging Face models, nanoGPT). They are drawn on the CPU: the same
    for every device.

    Args:
        model: the user's model.
        names: parameters and buffers, by any of their names; tied ones are made once.
        seed: the job's seed.
        device: where they shall be.
        init_weights: the user's function, called for the owning module and then every module around it.

    Raises:
        UserError: nothing gives some tensor its values; names the module and what to do.
    """
    forget_weak_references(model)
    canonical = canonical_names(model)
    tensors = _tensors(model)
    wanted = list(dict.fromkeys(canonical[name] for name in names))
    missing = [name for name in wanted if tensors[name].is_meta]
    values = Initialiser(model, seed, init_weights).values_for(missing) if missing else {}
    for name in wanted:
        tensor = tensors[name]
        value = values.pop(name, None)
        if value is None and tensor.device == torch.device(device):
            continue
        set_storage(tensor, (tensor.detach() if value is None else value).to(device))


def release(model: nn.Module, names: Iterable[str]) -> None:
    """Takes the storage of the named parameters and buffers away: they become meta tensors, without
    gradients.
    """
    canonical = canonical_names(model)
    tensors = _tensors(model)
    for name in dict.fromkeys(canonical[name] for name in names):
        tensor = tensors[name]
        tensor.grad = None
        if not tensor.is_meta:
            set_storage(tensor, torch.empty_like(tensor.detach(), device="meta"))
    return_memory()


def forget_weak_references(model: nn.Module) -> None:
    """RNN modules watch their weights through weak references, which would forbid to change storage in place.

    They only serve to notice that a weight was replaced by another object, which never happens here.
    """
    for module in model.modules():
        if isinstance(module, nn.RNNBase):
            module._flat_weight_refs = [None] * len(module._flat_weight_refs)


def set_storage(tensor: Tensor, value: Tensor) -> None:
    """Puts ``value`` (same shape, any device) in the place of a tensor's contents; the object and its
    attributes stay.

    Its gradient is dropped. Must not be called while a graph that leads to the tensor is alive.
    """
    if isinstance(tensor, nn.Parameter):
        made: Tensor = nn.Parameter(value, requires_grad=tensor.requires_grad)
    else:
        made = value.detach()
    tensor.grad = None
    made.__dict__.update(tensor.__dict__)
    torch.utils.swap_tensors(tensor, made)  # type: ignore[no-untyped-call]


def return_memory() -> None:
    """Gives freed memory back to the operating system, where the C library keeps it otherwise."""
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def digest_of(tensors: Iterable[Tensor]) -> str:
    """sha256 (hex) of dtypes, shapes and bytes, in order: to find workers that built different initial weights.

    Raises:
        UserError: one of them is on the meta device.
    """
    digest = hashlib.sha256()
    for tensor in tensors:
        if tensor.is_meta:
            raise UserError("A tensor on the meta device has no values to compare. Materialise it first.")
        digest.update(f"{tensor.dtype} {tuple(tensor.shape)}\n".encode())
        data: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
        digest.update(data)
    return digest.hexdigest()


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return dict(
        chain(
            model.named_parameters(remove_duplicate=False),
            model.named_buffers(remove_duplicate=False),
        )
    )
