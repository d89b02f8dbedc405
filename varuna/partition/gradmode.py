"""``torch.no_grad`` inside forward, as ``detach`` in the graph.

The exporter turns such a block into a nested graph, which cannot be divided, and loses it inside an autocast
block (torch 2.13). So while the model is captured, changes of the gradient mode are recorded by an operator of
ours; the converter then lets every operator of the block read detached values, which gives the same results and
no gradients.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.overrides import TorchFunctionMode


@torch.library.custom_op("varuna::grad_mode", mutates_args=())
def grad_mode_op(enabled: bool) -> None:
    """Marks in the exported graph that gradients are on or off from here."""


@grad_mode_op.register_fake
def _(enabled: bool) -> None:
    return None


fx.node.has_side_effect(torch.ops.varuna.grad_mode.default)


class RecordGradMode(TorchFunctionMode):
    """Inside: ``torch.no_grad`` and its kin work as always and leave ``varuna::grad_mode`` in the trace."""

    def __torch_function__(
        self,
        func: Any,
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is not torch._C._set_grad_enabled:
            return func(*args, **(kwargs or {}))
        with torch._C.DisableTorchFunction():
            torch._C._set_grad_enabled(*args)
        return grad_mode_op(bool(args[0]))


def is_grad_mode(node: fx.Node) -> bool:
    """Whether a node only marks a change of the gradient mode."""
    return node.target is torch.ops.varuna.grad_mode.default


@dataclass
class Detacher:
    """Detaches what a graph under construction reads while gradients are off.

    Attributes:
        graph: where nodes are added.
        enabled: whether gradients are on at this place.
    """

    graph: fx.Graph
    enabled: bool = True
    _detached: dict[fx.Node, fx.Node] = field(default_factory=dict)
    _without: set[fx.Node] = field(default_factory=set)

    def read(self, node: fx.Node) -> fx.Node:
        """The node to read instead of ``node`` at this place."""
        if self.enabled or node in self._without or not _may_have_history(node):
            return node
        if node not in self._detached:
            made = self.graph.call_function(torch.ops.aten.detach.default, (node,))
            made.meta = {key: value for key, value in node.meta.items() if key != "input_key"}
            made.meta["val"] = node.meta["val"].detach()
            self._detached[node] = made
            self._without.add(made)
        return self._detached[node]

    def result(self, made: fx.Node) -> fx.Node:
        """The node that later ones read for ``made``; what is changed in place keeps its own history."""
        if self.enabled:
            return made
        self._without.add(made)
        target = made.target
        if not isinstance(target, torch._ops.OpOverload) or not target._schema.is_mutable:
            return made
        originals = [node for node, detached in self._detached.items() if made.args[:1] == (detached,)]
        return originals[0] if originals else made


def _may_have_history(node: fx.Node) -> bool:
    value = node.meta.get("val")
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return False
    if node.op == "get_attr":
        return bool(node.meta.get("is_parameter"))
    return "input_key" not in node.meta
