"""What the converter does to single nodes: plain metadata, no checks, nothing unused, numbered marks."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx
from torch.utils import _pytree as pytree

from varuna.errors import CaptureError, CutPointError
from varuna.partition.gradmode import Detacher, is_grad_mode
from varuna.partition.graph import is_cut_point

ROOT = "model"  # the user's model inside the module that is exported
_LAST_LINE = re.compile(r'File "([^"]+)", line (\d+), ')

_CHECKS = frozenset(
    {
        "aten._assert_tensor_metadata",
        "aten._assert_scalar",
        "aten._assert_async",
        "aten.sym_constrain_range",
        "aten.sym_constrain_range_for_size",
    }
)


@dataclass(frozen=True)
class Sizes:
    """Turns symbolic sizes into numbers at the example batch size, and into text in ``b``."""

    example: int

    def metadata(self, node: fx.Node) -> dict[str, Any]:
        """``val``, ``sizes``, ``module_path`` and ``stack_trace`` of a node of the exported graph."""
        value = node.meta.get("val")
        return {
            "val": pytree.tree_map(self._value, value),
            "sizes": tuple(
                tuple(self._text(size) for size in item.shape)
                for item in pytree.tree_leaves(value)
                if isinstance(item, Tensor)
            ),
            "module_path": module_path(node),
            "stack_trace": _innermost_frame(node.meta.get("stack_trace") or ""),
        }

    def _value(self, value: Any) -> Any:
        if isinstance(value, Tensor):
            meta = torch.empty_strided(
                [self._number(size) for size in value.shape],
                [self._number(stride) for stride in value.stride()],
                dtype=value.dtype,
                device="meta",
            )
            return meta.requires_grad_(value.requires_grad)
        if isinstance(value, (torch.SymInt, torch.SymFloat, torch.SymBool)):
            return self._number(value)
        return value

    def _number(self, value: Any) -> Any:
        if isinstance(value, (int, float, bool)):
            return value
        expression = value.node.expr
        number = expression.xreplace(dict.fromkeys(expression.free_symbols, self.example))
        kind = int if isinstance(value, torch.SymInt) else float if isinstance(value, torch.SymFloat) else bool
        return kind(number)

    def _text(self, size: int | torch.SymInt) -> int | str:
        if isinstance(size, int):
            return size
        expression = size.node.expr
        if expression.is_number:
            return int(expression)
        text = str(expression)
        for symbol in expression.free_symbols:
            if str(symbol).startswith("s"):
                text = re.sub(rf"\b{symbol}\b", "b", text)
        return text


def module_path(node: fx.Node) -> str:
    """The innermost user module in which a node of the exported graph was made; ``""`` for the root."""
    stack = node.meta.get("nn_module_stack") or {}
    path = next(reversed(stack.values()))[0] if stack else ""
    path = re.sub(r"@\d+", "", str(path))
    return "" if path == ROOT else path.removeprefix(ROOT + ".")


def _innermost_frame(stack_trace: str) -> str:
    start = stack_trace.rfind('File "')
    return stack_trace[start:].strip() if start >= 0 else ""


def user_line(node: fx.Node) -> str:
    """``file:line`` in the user's code that a node comes from."""
    found = _LAST_LINE.search(node.meta.get("stack_trace") or "")
    return f"{found[1]}:{found[2]}" if found else "an unknown line"


def is_check(node: fx.Node) -> bool:
    """Whether a node only checks something, so that it can be left out."""
    target = node.target
    return isinstance(target, torch._ops.OpOverload) and str(target).rpartition(".")[0] in _CHECKS


def has_effect(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> bool:
    """Whether a node does more than give its value: changes a tensor, draws random numbers, is a mark or a
    leaf.
    """
    if node.op in ("placeholder", "output", "call_module") or is_cut_point(node):
        return True
    target = node.target
    if isinstance(target, torch._ops.HigherOrderOperator):
        names = [item.target for item in node.all_input_nodes if item.op == "get_attr"]
        nested = [subgraphs[str(name)] for name in names if name in subgraphs]
        return any(_has_effect_inside(module) for module in nested)
    if not isinstance(target, torch._ops.OpOverload):
        return False
    return bool(target._schema.is_mutable) or torch.Tag.nondeterministic_seeded in target.tags


def _has_effect_inside(module: fx.GraphModule) -> bool:
    children: dict[str, fx.GraphModule] = {
        name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)
    }
    nodes = [node for node in module.graph.nodes if node.op not in ("placeholder", "output")]
    return any(has_effect(node, children) for node in nodes)


def remove_unused(graph: fx.Graph, subgraphs: Mapping[str, fx.GraphModule]) -> None:
    """Takes out, from the end, every node that nobody uses and that has no effect."""
    for node in reversed(list(graph.nodes)):
        if not node.users and not has_effect(node, subgraphs):
            graph.erase_node(node)


def tidy_nested(module: fx.GraphModule, sizes: Sizes) -> fx.GraphModule:
    """A nested graph without checks and with our metadata, deeper ones included."""
    children = {
        name: tidy_nested(child, sizes)
        for name, child in module.named_children()
        if isinstance(child, fx.GraphModule)
    }
    graph = fx.Graph()
    gradients = Detacher(graph)
    made: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        if node.target is torch.ops.varuna.leaf.default:
            raise CaptureError(
                "An opaque module is called inside an autocast block. Make the module that has the block "
                "opaque "
                "instead (opaque=[...])."
            )
        if is_grad_mode(node):
            gradients.enabled = bool(node.args[0])
        elif not is_check(node):
            copied = graph.node_copy(node, lambda item: gradients.read(made[item]))
            copied.meta = sizes.metadata(node)
            made[node] = gradients.result(copied)
    remove_unused(graph, children)
    return fx.GraphModule(dict(children), graph, class_name="Nested")


def number_cut_points(graph: fx.Graph) -> None:
    """Numbers the marks from 0 in the order of the graph. Raises CutPointError if one is passed twice."""
    seen: dict[Any, fx.Node] = {}
    for node in graph.nodes:
        if not is_cut_point(node):
            continue
        tensor, mark = node.args
        if mark in seen:
            path = seen[mark].meta["module_path"]
            raise CutPointError(
                f"The CutPoint {path!r} is called twice in one forward. A mark stands for one place; make a "
                f"CutPoint of its own for each, or call it once."
            )
        seen[mark] = node
        node.args = (tensor, len(seen) - 1)


def refuse_marks_inside(module: fx.GraphModule) -> None:
    """Raises CutPointError if a mark lies inside a nested graph."""
    for child in module.modules():
        if not isinstance(child, fx.GraphModule):
            continue
        for node in child.graph.nodes:
            if is_cut_point(node):
                raise CutPointError(
                    f"The CutPoint {node.meta['module_path']} at {user_line(node)} lies inside a "
                    f"torch.no_grad, "
                    f"torch.enable_grad or autocast block, which cannot be divided. Move the mark out of the "
                    f"block."
                )
