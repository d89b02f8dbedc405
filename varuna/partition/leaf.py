"""Opaque leaves: modules whose inside the captured graph does not show.

A module whose code depends on the values of its tensors cannot be traced. While the model is captured its
``forward`` is replaced by one call of the operator ``varuna::leaf``, which only tells shapes; in the finished
graph that call becomes a ``call_module`` node on the user's module. What shapes the module gives is learned by
running a temporary copy of it on small inputs, with two batch sizes, so that sizes that follow the batch are
known from those that do not.
"""

from __future__ import annotations

import copy
import functools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import _disable_current_modes

from varuna.errors import CaptureError

Size = int | torch.SymInt
_PLAIN = (type(None), bool, int, float, str, torch.dtype, torch.device)


@torch.library.custom_op("varuna::leaf", mutates_args=())
def leaf_op(
    tensors: Sequence[Tensor], sizes: Sequence[int], batch: int, call_index: int, outputs: str
) -> list[Tensor]:
    """Stands for call number ``call_index`` of an opaque leaf; ``outputs`` is ``OutputShape``s as JSON."""
    raise CaptureError("varuna::leaf is a placeholder used while a model is captured; it cannot be computed.")


@leaf_op.register_fake
def _(
    tensors: Sequence[Tensor], sizes: Sequence[int], batch: int, call_index: int, outputs: str
) -> list[Tensor]:
    return [
        tensors[0].new_empty(
            [scale * batch + offset for scale, offset in shape["sizes"]],
            dtype=getattr(torch, shape["dtype"]),
        )
        for shape in json.loads(outputs)
    ]


def _backward(ctx: Any, *gradients: Any) -> Any:
    raise CaptureError("varuna::leaf cannot be differentiated.")


leaf_op.register_autograd(_backward)


class ProbeError(Exception):
    """A leaf raised when it was run by itself on small inputs; ``path`` is the leaf."""

    def __init__(self, path: str) -> None:
        super().__init__(f"The module {path!r} fails on small random inputs.")
        self.path = path


@dataclass(frozen=True, kw_only=True)
class LeafCall:
    """One call of a leaf in forward.

    Attributes:
        path: the user's module.
        arguments: leaves of the pytree ``(args, kwargs)``: a constant, or ``Slot`` where a tensor or a size
            goes.
        in_spec, out_spec: pytree structures of the arguments and of the output.
        outputs: leaves of the output: a constant, or ``Slot``.
    """

    path: str
    arguments: tuple[Any, ...]
    in_spec: pytree.TreeSpec
    outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec


@dataclass(frozen=True)
class Slot:
    """Where a tensor (``kind="tensor"``) or a size that follows the batch (``"size"``) goes."""

    kind: str
    index: int


@dataclass
class LeafTracer:
    """Replaces leaves' ``forward`` during one capture and remembers their calls.

    Attributes:
        originals: the model's real tensors by name; leaves are probed with them, or with random ones if on
            meta.
        device: device the probe runs on.
        batch: the number of samples as the tracer knows it; set when forward begins.
    """

    originals: Mapping[str, Tensor]
    device: str
    batch: Size = 0
    calls: list[LeafCall] = field(default_factory=list)
    _known: dict[str, _Probed] = field(default_factory=dict)

    @contextmanager
    def installed(self, model: nn.Module, paths: Sequence[str]) -> Iterator[None]:
        """Inside: the modules at ``paths`` are opaque."""
        replaced: list[tuple[nn.Module, Any]] = []
        try:
            for path in paths:
                module = model.get_submodule(path)
                replaced.append((module, module.__dict__.get("forward")))
                module.__dict__["forward"] = functools.partial(self._call, module, path, replaced[-1][1])
            yield
        finally:
            for module, own_forward in replaced:
                del module.__dict__["forward"]
                if own_forward is not None:
                    module.__dict__["forward"] = own_forward

    def _call(
        self, module: nn.Module, path: str, own_forward: Callable[..., Any] | None, /, *args: Any, **kwargs: Any
    ) -> Any:
        leaves, in_spec = pytree.tree_flatten((args, kwargs))
        tensors = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        sizes = [leaf for leaf in leaves if isinstance(leaf, torch.SymInt)]
        if not tensors:
            raise CaptureError(f"The opaque module {path!r} is called without a tensor; it cannot be a leaf.")
        arguments = _with_slots(leaves, path)
        probed = self._probe(module, path, own_forward, leaves, in_spec)
        trainable = [p for p in module.parameters() if p.requires_grad and p.is_floating_point()][:1]
        self.calls.append(
            LeafCall(
                path=path,
                arguments=arguments,
                in_spec=in_spec,
                outputs=probed.outputs,
                out_spec=probed.out_spec,
            )
        )
        given = leaf_op([*tensors, *trainable], sizes, self.batch, len(self.calls) - 1, probed.shapes)
        filled = [given[leaf.index] if isinstance(leaf, Slot) else leaf for leaf in probed.outputs]
        return pytree.tree_unflatten(filled, probed.out_spec)

    def _probe(
        self,
        module: nn.Module,
        path: str,
        own_forward: Callable[..., Any] | None,
        leaves: Sequence[Any],
        in_spec: pytree.TreeSpec,
    ) -> _Probed:
        batch_sizes = (2, 3) if isinstance(self.batch, torch.SymInt) else (int(self.batch),)
        calls = [[_describe_at(leaf, self.batch, size) for leaf in leaves] for size in batch_sizes]
        key = repr((module, [tuple(p.shape) for p in module.parameters()], calls, in_spec))
        if key not in self._known:
            with (
                torch._C.DisableTorchFunction(),
                _disable_current_modes(),
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
            ):
                torch.manual_seed(0)
                leaf = _real_copy(module, path, self.originals, self.device, own_forward)
                found = [_run(leaf, path, described, in_spec, self.device) for described in calls]
            self._known[key] = _learn(path, found, batch_sizes)
        return self._known[key]


@dataclass(frozen=True, kw_only=True)
class _Probed:
    shapes: str
    outputs: tuple[Any, ...]
    out_spec: pytree.TreeSpec


@dataclass(frozen=True)
class _TensorOf:
    shape: tuple[int, ...]
    dtype: torch.dtype


def _with_slots(leaves: Sequence[Any], path: str) -> tuple[Any, ...]:
    slots: list[Any] = []
    counts = {"tensor": 0, "size": 0}
    for leaf in leaves:
        kind = "tensor" if isinstance(leaf, Tensor) else "size" if isinstance(leaf, torch.SymInt) else ""
        if kind:
            slots.append(Slot(kind, counts[kind]))
            counts[kind] += 1
        elif isinstance(leaf, _PLAIN):
            slots.append(leaf)
        else:
            raise CaptureError(
                f"The opaque module {path!r} takes or gives a {type(leaf).__name__}. Opaque modules may pass "
                f"tensors, "
                f"numbers, text, None, and lists, tuples and dicts of them; make the module around it opaque "
                f"instead."
            )
    return tuple(slots)


def _describe_at(leaf: Any, batch: Size, batch_size: int) -> Any:
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


def _run(
    leaf: nn.Module, path: str, described: Sequence[Any], in_spec: pytree.TreeSpec, device: str
) -> tuple[list[Any], pytree.TreeSpec]:
    inputs = [_real_value(item, device) for item in described]
    args, kwargs = pytree.tree_unflatten(inputs, in_spec)
    try:
        output = leaf(*args, **kwargs)
    except Exception as error:
        raise ProbeError(path) from error
    return pytree.tree_flatten(output)


def _real_copy(
    module: nn.Module,
    path: str,
    originals: Mapping[str, Tensor],
    device: str,
    own_forward: Callable[..., Any] | None,
) -> nn.Module:
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


def _learn(
    path: str, found: Sequence[tuple[list[Any], pytree.TreeSpec]], batch_sizes: Sequence[int]
) -> _Probed:
    first, out_spec = found[0]
    last, last_spec = found[-1]
    if out_spec != last_spec or len(first) != len(last):
        raise CaptureError(f"The opaque module {path!r} returns other things for another batch size.")
    shapes = [
        {"dtype": str(one.dtype).removeprefix("torch."), "sizes": _linear(path, one, other, batch_sizes)}
        for one, other in zip(first, last, strict=True)
        if isinstance(one, Tensor)
    ]
    return _Probed(shapes=json.dumps(shapes), outputs=_with_slots(first, path), out_spec=out_spec)


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
