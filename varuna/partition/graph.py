"""``CapturedGraph``: one forward pass of the user's model, loss included, as a graph of operators.

Nodes of ``graph`` (a ``torch.fx.Graph``):

* ``placeholder``: one per tensor of the batch, in the order of ``input_keys``; ``input_key(node)`` gives its
  key.
* ``get_attr``: a parameter or buffer by the user's dotted name (for tied parameters always the first name in
  ``named_parameters()``), a constant by its name in ``constants``, or a nested graph by its name in
  ``subgraphs``.
* ``call_function``: an operator. ``varuna.cut_point`` marks a ``CutPoint``: arguments (tensor, number of the
  mark from 0); it is the identity and whoever splits the graph takes it out.
* ``call_module``: an opaque leaf, by the user's module path.
* ``output``: a tuple of tensors, read by ``output_spec``.

``torch.no_grad`` blocks are there as ``detach`` of what the block reads; autocast blocks as nested graphs.

Metadata of nodes: ``val`` (meta tensors at ``example_batch_size``, or a number, or a tuple or list of these;
whether they require gradients is only told for ``get_attr``), ``sizes`` (for each tensor in ``val``, in order,
its sizes as ints or as text in ``b``, the number of samples, e.g. ``"b"``, ``"128*b"``), ``module_path`` (the
innermost user module, ``""`` for the root), ``stack_trace`` (the innermost line of Python).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna.partition.loss import OutputSpec
from varuna.partition.signature import InputSignature


class Autocast(Protocol):
    """What capture needs of the run's precision: ``repr`` must be the same in every process."""

    @property
    def device_type(self) -> str:
        """``cpu`` or ``cuda``."""

    def context(self) -> AbstractContextManager[Any]:
        """The autocast context the forward pass runs under."""


@dataclass(frozen=True, kw_only=True)
class CapturedGraph:
    """See the module's docstring.

    Attributes:
        graph: the operators; treat as read-only, copy before changing.
        input_keys: keys of the placeholders, in order.
        constants: tensors that are neither parameters nor buffers, by the name ``get_attr`` nodes use.
        subgraphs: bodies of nested regions (autocast, no_grad), by the name ``get_attr`` nodes use.
        output_spec: how the outputs are read.
        signature: the batch it was captured for.
        training: captured in train mode.
        dynamic_batch: any number of samples; otherwise only ``example_batch_size``.
        static_reason: why the number of samples is fixed; empty if it is not.
        example_batch_size: number of samples that ``meta["val"]`` stands for.
        opaque: paths of the leaves, the user's and those found by themselves.
        device: the device that factory functions in the graph name, until ``to_device``.
        aliases: other name -> the name used in the graph, for tied parameters and buffers.
    """

    graph: fx.Graph
    input_keys: tuple[str, ...]
    constants: dict[str, Tensor]
    subgraphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    output_spec: OutputSpec
    signature: InputSignature
    training: bool
    dynamic_batch: bool
    example_batch_size: int
    static_reason: str = ""
    opaque: tuple[str, ...] = ()
    device: str = "cpu"
    aliases: dict[str, str] = field(default_factory=dict)

    def to_device(self, device: torch.device | str) -> CapturedGraph:
        """A copy whose factory functions, nested ones included, make their tensors on ``device``; constants go
        there.
        """
        target = torch.device(device)

        def moved(value: Any) -> Any:
            return target if isinstance(value, torch.device) and value.type == self.device else value

        return replace(
            self,
            graph=_map_devices(self.graph, moved),
            subgraphs={name: _map_nested(module, moved) for name, module in self.subgraphs.items()},
            constants={
                name: value.to(target) if value.device.type == self.device else value
                for name, value in self.constants.items()
            },
            device=target.type,
        )


def input_key(node: fx.Node) -> str:
    """The batch key of a placeholder."""
    key: str = node.meta["input_key"]
    return key


def is_cut_point(node: fx.Node) -> bool:
    """Whether a node is a ``CutPoint`` of the user."""
    return node.op == "call_function" and node.target is torch.ops.varuna.cut_point.default


def values_of(node: fx.Node) -> tuple[Tensor, ...]:
    """The meta tensors that a node gives, in order; empty for numbers."""
    return tuple(item for item in pytree.tree_leaves(node.meta.get("val")) if isinstance(item, Tensor))


def batch_dims_of(node: fx.Node) -> tuple[int | None, ...]:
    """For each tensor of ``values_of(node)``: the dimension whose size is the number of samples, or None."""
    sizes: tuple[tuple[int | str, ...], ...] = node.meta.get("sizes", ())
    return tuple(shape.index("b") if "b" in shape else None for shape in sizes)


def executable(captured: CapturedGraph, model: torch.nn.Module) -> fx.GraphModule:
    """The whole graph over the model's own parameters, buffers and leaves: takes the tensors in ``input_keys``
    order.

    For checks; the caller must not move or change modules through it.
    """
    available: dict[str, Any] = {
        **dict(model.named_parameters(remove_duplicate=False)),
        **dict(model.named_buffers(remove_duplicate=False)),
        **captured.constants,
        **captured.subgraphs,
    }
    used: dict[str, Any] = {}
    for node in captured.graph.nodes:
        if node.op == "get_attr":
            used[node.target] = available[node.target]
        elif node.op == "call_module":
            used[node.target] = model.get_submodule(node.target)
    return fx.GraphModule(used, captured.graph)


def nodes_with_subgraphs(captured: CapturedGraph) -> Iterator[fx.Node]:
    """All nodes, those of nested graphs included."""
    yield from captured.graph.nodes
    for module in captured.subgraphs.values():
        for inner in module.modules():
            if isinstance(inner, fx.GraphModule):
                yield from inner.graph.nodes


def _map_devices(graph: fx.Graph, moved: Callable[[Any], Any]) -> fx.Graph:
    made = fx.Graph()
    output = made.graph_copy(graph, {}, return_output_node=True)
    assert isinstance(output, tuple)
    value, old_output = output
    made.output(value).meta = dict(old_output.meta)
    for node in made.nodes:
        node.args = pytree.tree_map(moved, node.args)
        node.kwargs = pytree.tree_map(moved, node.kwargs)
    return made


def _map_nested(module: fx.GraphModule, moved: Callable[[Any], Any]) -> fx.GraphModule:
    children = {
        name: _map_nested(child, moved)
        for name, child in module.named_children()
        if isinstance(child, fx.GraphModule)
    }
    return fx.GraphModule(dict(children), _map_devices(module.graph, moved), class_name="Nested")
