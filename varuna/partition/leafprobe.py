"""What an opaque leaf returns: learned by running a temporary copy of it on small inputs at two batch sizes."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.errors import CaptureError

Size = int | torch.SymInt
PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


class ProbeError(Exception):
    """What a leaf returns cannot be learned, e.g. since it raised on small inputs; ``path`` is the leaf."""

    def __init__(self, path: str, what: str = "fails on small random inputs") -> None:
        super().__init__(f"The module {path!r} {what}.")
        self.path = path


@dataclass(frozen=True)
class Slot:
    """Where a tensor (``kind="tensor"``) or a size that follows the batch (``"size"``) goes."""

    kind: str
    index: int


@dataclass(frozen=True, kw_only=True)
class Probed:
    """Shapes a leaf returns, as JSON for ``varuna::leaf``, and leaves and structure of its output."""

    shapes: str
    outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec


@dataclass(frozen=True)
class _TensorOf:
    shape: tuple[int, ...]
    dtype: torch.dtype


def with_slots(leaves: Sequence[Any], path: str) -> tuple[Any, ...]:
    """Leaves of a pytree with ``Slot`` in place of tensors and of sizes that follow the batch."""
    slots: list[Any] = []
    counts = {"tensor": 0, "size": 0}
    for leaf in leaves:
        kind = "tensor" if isinstance(leaf, Tensor) else "size" if isinstance(leaf, torch.SymInt) else ""
        if kind:
            slots.append(Slot(kind, counts[kind]))
            counts[kind] += 1
        elif isinstance(leaf, PLAIN):
            slots.append(leaf)
        else:
            raise CaptureError(
                f"The opaque module {path!r} takes or gives a {type(leaf).__name__}. Opaque modules may pass "
                f"tensors, "
                f"numbers, text, None, and lists, tuples and dicts of them; make the module around it opaque "
                f"instead."
            )
    return tuple(slots)


def describe_at(leaf: Any, batch: Size, batch_size: int) -> Any:
    """A leaf of the arguments at one batch size: a tensor's shape and dtype, a size's number, a constant."""
    if isinstance(leaf, Tensor):
        return _TensorOf(tuple(_size_at(size, batch, batch_size) for size in leaf.shape), leaf.dtype)
    return _size_at(leaf, batch, batch_size) if isinstance(leaf, torch.SymInt) else leaf


def _size_at(size: Size, batch: Size, batch_size: int) -> int:
    if isinstance(size, int) or isinstance(batch, int):
        return int(size)
    expression = size.node.expr.xreplace({batch.node.expr: batch_size})
    if not isinstance(expression, int) and not expression.is_number:
        raise CaptureError(f"An opaque module's input has a size that depends on values ({expression}).")
    return int(expression)


def _real_value(described: Any, device: str) -> Any:
    if not isinstance(described, _TensorOf):
        return described
    if described.dtype.is_floating_point or described.dtype.is_complex:
        return torch.randn(described.shape, device=device).to(described.dtype)
    if described.dtype is torch.bool:
        return torch.ones(described.shape, dtype=torch.bool, device=device)
    return torch.zeros(described.shape, dtype=described.dtype, device=device)


def run_leaf(
    leaf: nn.Module, path: str, described: Sequence[Any], in_spec: pytree.TreeSpec, device: str
) -> tuple[list[Any], pytree.TreeSpec]:
    """What a copy of a leaf returns on small inputs. Raises ProbeError if it raises."""
    inputs = [_real_value(item, device) for item in described]
    args, kwargs = pytree.tree_unflatten(inputs, in_spec)
    try:
        output = leaf(*args, **kwargs)
    except Exception as error:
        raise ProbeError(path) from error
    return pytree.tree_flatten(output)


def real_copy(
    module: nn.Module,
    path: str,
    originals: Mapping[str, Tensor],
    device: str,
    own_forward: Callable[..., Any] | None,
) -> nn.Module:
    """A copy of a leaf with values: its own, or small random ones if they are on the meta device."""
    memo: dict[int, Any] = {}
    named = [*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)]
    for name, fake in named:
        if id(fake) not in memo:
            memo[id(fake)] = _real_tensor(originals[f"{path}.{name}"], device)
    standing_in = module.__dict__.pop("forward")  # refers to the whole model: must not be copied
    try:
        made = copy.deepcopy(module, memo)
        if own_forward is not None:
            made.__dict__["forward"] = copy.deepcopy(own_forward, memo)
    finally:
        module.__dict__["forward"] = standing_in
    return made


def _real_tensor(original: Tensor, device: str) -> Tensor:
    if original.is_meta:
        value = torch.zeros(original.shape, dtype=original.dtype, device=device)
        if original.is_floating_point():
            value.normal_(std=0.02)
    else:
        value = original.detach().to(device, copy=True)
    return nn.Parameter(value, original.requires_grad) if isinstance(original, nn.Parameter) else value


def learn(path: str, found: Sequence[tuple[list[Any], pytree.TreeSpec]], batch_sizes: Sequence[int]) -> Probed:
    """What a leaf returns, from its outputs at the given batch sizes."""
    first, out_spec = found[0]
    last, last_spec = found[-1]
    if out_spec != last_spec or len(first) != len(last):
        raise CaptureError(f"The opaque module {path!r} returns other things for another batch size.")
    shapes = [
        {"dtype": str(one.dtype).removeprefix("torch."), "sizes": _linear(path, one, other, batch_sizes)}
        for one, other in zip(first, last, strict=True)
        if isinstance(one, Tensor)
    ]
    return Probed(shapes=json.dumps(shapes), outputs=with_slots(first, path), out_spec=out_spec)


def _linear(path: str, one: Tensor, other: Tensor, batch_sizes: Sequence[int]) -> list[list[int]]:
    """Every size as [scale, offset]: scale times the number of samples plus offset."""
    if one.dim() != other.dim():
        raise CaptureError(
            f"The opaque module {path!r} returns another number of dimensions for another batch size."
        )
    span = batch_sizes[-1] - batch_sizes[0]
    sizes = []
    for small, large in zip(one.shape, other.shape, strict=True):
        scale = (large - small) // span if span else 0
        sizes.append([scale, small - scale * batch_sizes[0]])
    return sizes
