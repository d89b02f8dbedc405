"""What one graph node does besides computing a value: writes to its arguments, aliases them, draws random
numbers.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch._ops import HigherOrderOperator, OpOverload

# Composite operators that may return their argument itself although the schema does not say so.
_MAY_RETURN_ARGUMENT = {
    torch.ops.aten.dropout.default,
    torch.ops.aten.feature_dropout.default,
    torch.ops.aten.alpha_dropout.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.flatten.using_ints,
    torch.ops.aten.type_as.default,
}

# Operators that give a parameter in another form and cost next to nothing: done again in each section that
# needs it.
RESHAPES = {
    torch.ops.aten.alias.default,
    torch.ops.aten.t.default,
    torch.ops.aten.transpose.int,
    torch.ops.aten.permute.default,
    torch.ops.aten.view.default,
    torch.ops.aten.reshape.default,
    torch.ops.aten.unsqueeze.default,
    torch.ops.aten.squeeze.dim,
    torch.ops.aten.expand.default,
    torch.ops.aten.contiguous.default,
    torch.ops.aten.detach.default,
    torch.ops.aten.to.dtype,
    torch.ops.aten._to_copy.default,
}

_PROBABILITY_NAMES = ("p", "dropout", "dropout_p")


@dataclass(frozen=True, kw_only=True)
class Effects:
    """Side effects of one node.

    Attributes:
        writes: argument nodes whose memory it changes.
        aliases: argument nodes whose memory its value may share.
        random: draws random numbers.
    """

    writes: tuple[fx.Node, ...] = ()
    aliases: tuple[fx.Node, ...] = ()
    random: bool = False


def effects_of(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> Effects:
    """Side effects of a node; a nested region's are those of all operators in it, a leaf's are unknown but
    random.
    """
    if node.op == "call_module":
        return Effects(random=True)
    if node.op != "call_function":
        return Effects()
    if isinstance(node.target, OpOverload):
        return _effects_of_operator(node, node.target)
    if node.target is operator.getitem:
        return Effects(aliases=tuple(node.all_input_nodes[:1]))
    if isinstance(node.target, HigherOrderOperator):
        return _effects_of_region(node, subgraphs)
    return Effects()


def region_of(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> fx.GraphModule | None:
    """The body of a nested region's node, or None for other nodes."""
    if node.op != "call_function" or not isinstance(node.target, HigherOrderOperator):
        return None
    for argument in node.args:
        if isinstance(argument, fx.Node) and is_subgraph(argument, subgraphs):
            return subgraphs[str(argument.target)]
    return None


def is_subgraph(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> bool:
    """Whether a node names the body of a nested region."""
    return node.op == "get_attr" and str(node.target) in subgraphs


def region_arguments(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> dict[fx.Node, Any]:
    """Placeholders of a region's body to the arguments it is called with."""
    body = region_of(node, subgraphs)
    assert body is not None
    index = next(i for i, a in enumerate(node.args) if isinstance(a, fx.Node) and is_subgraph(a, subgraphs))
    placeholders = [inner for inner in body.graph.nodes if inner.op == "placeholder"]
    return dict(zip(placeholders, node.args[index + 1 :], strict=True))


def nested_nodes(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> Iterator[fx.Node]:
    """A node and, if it is a nested region, all operators inside."""
    yield node
    body = region_of(node, subgraphs)
    if body is not None:
        inner_graphs = {**subgraphs, **_children(body)}
        for inner in body.graph.nodes:
            yield from nested_nodes(inner, inner_graphs)


def _children(body: fx.GraphModule) -> dict[str, fx.GraphModule]:
    return {name: child for name, child in body.named_children() if isinstance(child, fx.GraphModule)}


def _effects_of_operator(node: fx.Node, target: OpOverload) -> Effects:
    writes: list[fx.Node] = []
    aliases: list[fx.Node] = []
    returned = {
        name
        for value in target._schema.returns
        if value.alias_info is not None
        for name in value.alias_info.before_set | value.alias_info.after_set
    }
    for argument, value in schema_arguments(node, target):
        nodes = list(_nodes_in(value))
        info = argument.alias_info
        if info is not None and nodes:
            if info.is_write:
                writes += nodes
            if "*" in returned or returned & (info.before_set | info.after_set):
                aliases += nodes
    if target in _MAY_RETURN_ARGUMENT:
        aliases += node.all_input_nodes[:1]
    writes += _written_statistics(node, target)
    return Effects(writes=tuple(writes), aliases=tuple(aliases), random=_is_random(node, target))


def _effects_of_region(node: fx.Node, subgraphs: Mapping[str, fx.GraphModule]) -> Effects:
    body = region_of(node, subgraphs)
    if body is None:
        return Effects(aliases=tuple(node.all_input_nodes))
    inner_graphs = {**subgraphs, **_children(body)}
    # inner value -> the region's arguments it may share memory with
    shares: dict[fx.Node, set[fx.Node]] = {
        inner: {outer} if isinstance(outer, fx.Node) else set()
        for inner, outer in region_arguments(node, subgraphs).items()
    }
    writes: dict[fx.Node, None] = {}
    aliases: dict[fx.Node, None] = {}
    random = False
    for inner in body.graph.nodes:
        effects = effects_of(inner, inner_graphs)
        random |= effects.random
        for written in effects.writes:
            writes.update(dict.fromkeys(shares.get(written, ())))
        if inner.op == "output":
            for value in inner.all_input_nodes:
                aliases.update(dict.fromkeys(shares.get(value, ())))
        else:
            shares.setdefault(inner, set()).update(*(shares.get(a, set()) for a in effects.aliases))
    order = node.all_input_nodes
    return Effects(
        writes=tuple(n for n in order if n in writes),
        aliases=tuple(n for n in order if n in aliases),
        random=random,
    )


def schema_arguments(node: fx.Node, target: OpOverload) -> Iterator[tuple[Any, Any]]:
    """Pairs of schema argument and what the node passes for it (its default if nothing)."""
    for index, argument in enumerate(target._schema.arguments):
        if index < len(node.args):
            yield argument, node.args[index]
        elif argument.name in node.kwargs:
            yield argument, node.kwargs[argument.name]
        else:
            yield argument, argument.default_value if argument.has_default_value() else None


def _written_statistics(node: fx.Node, target: OpOverload) -> list[fx.Node]:
    """Running statistics, which these operators change although their schema does not say so."""
    if target not in (torch.ops.aten.batch_norm.default, torch.ops.aten.instance_norm.default):
        return []
    given = arguments_of(node, target)
    if not given.get("training", given.get("use_input_stats")):
        return []
    return [given[name] for name in ("running_mean", "running_var") if isinstance(given[name], fx.Node)]


def arguments_of(node: fx.Node, target: OpOverload) -> dict[str, Any]:
    """What a node passes to its operator, by the schema's names, defaults filled in."""
    return {argument.name: value for argument, value in schema_arguments(node, target)}


def _is_random(node: fx.Node, target: OpOverload) -> bool:
    if torch.Tag.nondeterministic_seeded not in target.tags:
        return False
    given = arguments_of(node, target)
    if given.get("train", given.get("training", True)) is False:
        return False
    return all(given.get(name) != 0 for name in _PROBABILITY_NAMES)


def _nodes_in(value: Any) -> Iterator[fx.Node]:
    if isinstance(value, fx.Node):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _nodes_in(item)
