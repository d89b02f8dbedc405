"""Opaque leaves: modules whose inside the captured graph does not show.

A module whose code depends on the values of its tensors cannot be traced. While the model is captured its
``forward`` is replaced by one call of the operator ``varuna::leaf``, which only tells shapes; in the finished
graph that call becomes a ``call_module`` node on the user's module. What shapes the module gives is learned by
running a temporary copy of it on small inputs, with two batch sizes, so that sizes that follow the batch are
known from those that do not.
"""

from __future__ import annotations

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
from varuna.partition.customgrad import custom_gradients_run
from varuna.partition.leafprobe import (
    Probed,
    ProbeError,
    Size,
    Slot,
    describe_at,
    learn,
    real_copy,
    run_leaf,
    with_slots,
)


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
    _known: dict[str, Probed] = field(default_factory=dict)

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
            raise ProbeError(path, "is called without a tensor, so it cannot be opaque")
        arguments = with_slots(leaves, path)
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
    ) -> Probed:
        batch_sizes = (2, 3) if isinstance(self.batch, torch.SymInt) else (int(self.batch),)
        calls = [[describe_at(leaf, self.batch, size) for leaf in leaves] for size in batch_sizes]
        key = repr((module, [tuple(p.shape) for p in module.parameters()], calls, in_spec))
        if key not in self._known:
            with (
                torch._C.DisableTorchFunction(),
                _disable_current_modes(),
                custom_gradients_run(),
                torch.random.fork_rng(devices=[]),
                torch.no_grad(),
            ):
                torch.manual_seed(0)
                leaf = real_copy(module, path, self.originals, self.device, own_forward)
                found = [run_leaf(leaf, path, described, in_spec, self.device) for described in calls]
            self._known[key] = learn(path, found, batch_sizes)
        return self._known[key]
