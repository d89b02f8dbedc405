"""Turns what ``torch.export`` made into our graph: the user's names, plain metadata, no guards, leaves as
modules.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch.export import ExportedProgram
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from varuna.errors import CaptureError
from varuna.partition.gradmode import Detacher, is_grad_mode
from varuna.partition.leaf import LeafCall
from varuna.partition.leafprobe import Slot
from varuna.partition.nodes import (
    ROOT,
    Sizes,
    is_check,
    module_path,
    number_cut_points,
    refuse_marks_inside,
    remove_unused,
    tidy_nested,
)


@dataclass(frozen=True, kw_only=True)
class Names:
    """What the converter must know of the model and the batch.

    Attributes:
        canonical: any name of a parameter or buffer -> the one to use.
        input_keys: of the user's inputs, in order.
    """

    canonical: Mapping[str, str]
    input_keys: Sequence[str]


@dataclass(frozen=True, kw_only=True)
class Converted:
    """Parts of a ``CapturedGraph`` that come from the exported program."""

    graph: fx.Graph
    constants: dict[str, Tensor]
    subgraphs: dict[str, fx.GraphModule]


def convert(
    exported: ExportedProgram, names: Names, leaf_calls: Sequence[LeafCall], example_batch_size: int
) -> Converted:
    """The exported program as our graph.

    Raises:
        CutPointError: a mark is passed twice or lies inside a nested region.
        CaptureError: the program has inputs that are no tensors, or a constant without values.
    """
    sizes = Sizes(example_batch_size)
    converter = _Converter(exported=exported, names=names, leaf_calls=leaf_calls, sizes=sizes)
    for node in exported.graph.nodes:
        converter.take(node)
    remove_unused(converter.graph, converter.subgraphs)
    number_cut_points(converter.graph)
    for module in converter.subgraphs.values():
        refuse_marks_inside(module)
    converter.graph.lint()
    used = {node.target for node in converter.graph.nodes if node.op == "get_attr"}
    return Converted(
        graph=converter.graph,
        constants={name: value for name, value in converter.constants.items() if name in used},
        subgraphs={name: value for name, value in converter.subgraphs.items() if name in used},
    )


@dataclass(kw_only=True)
class _Converter:
    exported: ExportedProgram
    names: Names
    leaf_calls: Sequence[LeafCall]
    sizes: Sizes
    graph: fx.Graph = field(default_factory=fx.Graph)
    constants: dict[str, Tensor] = field(default_factory=dict)
    subgraphs: dict[str, fx.GraphModule] = field(default_factory=dict)
    _made: dict[fx.Node, Any] = field(default_factory=dict)
    _attributes: dict[str, fx.Node] = field(default_factory=dict)
    _num_inputs: int = 0

    def __post_init__(self) -> None:
        self._grad = Detacher(self.graph)
        self._inputs = {spec.arg.name: spec for spec in self.exported.graph_signature.input_specs}

    def take(self, node: fx.Node) -> None:
        """Adds what becomes of one node of the exported graph."""
        if node.op == "placeholder":
            self._made[node] = self._input(node)
        elif node.op == "get_attr":
            self._made[node] = self._nested(node)
        elif node.op == "output":
            self.graph.output(self._map(node.args[0])).meta = {"module_path": ""}
        elif is_grad_mode(node):
            self._grad.enabled = bool(node.args[0])
        elif node.target is torch.ops.varuna.leaf.default:
            self._made[node] = self._leaf(node)
        elif self._is_leaf_output(node):
            self._made[node] = self._made[node.args[0]][node.args[1]]  # type: ignore[index]
        elif not is_check(node):
            self._made[node] = self._copy(node)

    def _is_leaf_output(self, node: fx.Node) -> bool:
        source = node.args[0] if node.target is operator.getitem else None
        return isinstance(source, fx.Node) and isinstance(self._made[source], list)

    def _map(self, arguments: Any) -> Any:
        return fx.map_arg(arguments, lambda node: self._grad.read(self._made[node]))

    def _copy(self, node: fx.Node) -> fx.Node:
        args, kwargs = self._map(node.args), self._map(node.kwargs)
        made = self.graph.create_node(node.op, node.target, args, kwargs, node.name)
        self._describe(made, node)
        return self._grad.result(made)

    def _describe(self, made: fx.Node, node: fx.Node) -> None:
        made.meta = self.sizes.metadata(node)

    def _input(self, node: fx.Node) -> fx.Node:
        spec = self._inputs[node.name]
        if spec.kind is InputKind.USER_INPUT:
            key = self.names.input_keys[self._num_inputs]
            self._num_inputs += 1
            made = self.graph.placeholder("input_" + re.sub(r"\W", "_", key))
            self._describe(made, node)
            made.meta["input_key"] = key
            return made
        name = (spec.target or "").removeprefix(ROOT + ".")
        if spec.kind in (InputKind.PARAMETER, InputKind.BUFFER):
            made = self._attribute(self.names.canonical.get(name, name), node)
            made.meta["is_parameter"] = spec.kind is InputKind.PARAMETER
            return made
        if spec.kind is InputKind.CONSTANT_TENSOR:
            name = name if name not in self.names.canonical else f"_constant_{name}"
            self.constants[name] = self._constant(spec.target or "", name)
            return self._attribute(name, node)
        raise CaptureError(
            f"The model uses a {spec.kind.name} called {name!r}, which cannot be part of a graph."
        )

    def _constant(self, target: str, name: str) -> Tensor:
        value = self.exported.constants[target]
        if not isinstance(value, Tensor) or value.is_meta:
            raise CaptureError(
                f"The model's attribute {name!r} is a tensor without values (on the meta device) that is "
                f"neither a "
                f"parameter nor a buffer. Register it with register_buffer so that it can be made on every "
                f"worker."
            )
        return value.detach()

    def _attribute(self, name: str, node: fx.Node) -> fx.Node:
        if name not in self._attributes:
            made = self.graph.create_node("get_attr", name, name="attr_" + re.sub(r"\W", "_", name))
            self._describe(made, node)
            self._attributes[name] = made
        return self._attributes[name]

    def _nested(self, node: fx.Node) -> fx.Node:
        module = getattr(self.exported.graph_module, str(node.target), None)
        if not isinstance(module, fx.GraphModule):
            raise CaptureError(
                f"The captured graph has an attribute {node.target!r} of type {type(module).__name__}."
            )
        name = f"_subgraph_{len(self.subgraphs)}"
        self.subgraphs[name] = tidy_nested(module, self.sizes)
        made = self.graph.create_node("get_attr", name, name=name)
        made.meta = {"module_path": module_path(node)}
        return made

    def _leaf(self, node: fx.Node) -> list[fx.Node]:
        """One ``call_module``, and a node for every tensor in what the module returns."""
        call = self.leaf_calls[node.args[3]]  # type: ignore[index]
        given: dict[str, Sequence[Any]] = {"tensor": self._map(node.args[0]), "size": self._map(node.args[1])}
        leaves = [given[item.kind][item.index] if isinstance(item, Slot) else item for item in call.arguments]
        args, kwargs = pytree.tree_unflatten(leaves, call.in_spec)
        made = self.graph.create_node("call_module", call.path, args, kwargs, node.name)
        self._describe(made, node)
        made.meta["module_path"] = call.path
        tree = pytree.tree_unflatten(list(range(len(call.outputs))), call.out_spec)
        paths = [path for path, _ in pytree.tree_flatten_with_path(tree)[0]]
        tensors = [
            (path, item) for path, item in zip(paths, call.outputs, strict=True) if isinstance(item, Slot)
        ]
        return [self._grad.read(self._pick(made, path, item.index)) for path, item in tensors]

    def _pick(self, made: fx.Node, path: Sequence[Any], index: int) -> fx.Node:
        picked = made
        for key in path:
            step = key.idx if isinstance(key, pytree.SequenceKey) else getattr(key, "key", None)
            if step is None:
                raise CaptureError(
                    f"The opaque module {made.target!r} returns an object that cannot be taken apart "
                    f"({key!r}). Return "
                    f"a tensor or lists, tuples and dicts of tensors."
                )
            picked = self.graph.call_function(operator.getitem, (picked, step))
        if picked is not made:
            picked.meta = {
                "val": made.meta["val"][index],
                "sizes": (made.meta["sizes"][index],),
                "module_path": made.meta["module_path"],
                "stack_trace": made.meta["stack_trace"],
            }
        return picked
