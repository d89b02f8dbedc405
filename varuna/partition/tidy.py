"""Brings a captured graph into the form the splitter wants, on a copy.

* ``CutPoint`` nodes are taken out and remembered as places.
* Items of a tuple are taken right after the operator that gives it, so that no tuple is ever alive at a cut.
* The number of samples is read from an input, not from an intermediate value, so that it never crosses a cut.
* Unused parameters and buffers are dropped.
"""

from __future__ import annotations

import operator
import re

import torch
from torch import fx

from varuna.partition.graph import CapturedGraph, batch_dims_of, is_cut_point

_MULTIPLE_OF_BATCH = re.compile(r"^(?:(\d+)\*)?b$")


def tidy(captured: CapturedGraph) -> tuple[fx.Graph, tuple[fx.Node | None, ...]]:
    """A tidied copy of the graph, and for each mark of the user the node it stands before (None: the end)."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in captured.graph.nodes:
        copies[node] = graph.node_copy(node, copies.__getitem__)
    for node in graph.nodes:
        _unwrap_single_value(node)
    _gather_items(graph)
    _read_batch_size_from_inputs(graph)
    marks = _take_out_marks(graph)
    for node in list(graph.nodes):
        if node.op == "get_attr" and not node.users:
            graph.erase_node(node)
    return graph, tuple(_next_kept(node) for node in marks)


def _next_kept(node: fx.Node) -> fx.Node | None:
    while node._erased:
        node = node.next
    return None if node.op in ("output", "root") else node


def _take_out_marks(graph: fx.Graph) -> list[fx.Node]:
    marks: list[fx.Node] = []
    for node in list(graph.nodes):
        if is_cut_point(node):
            value = node.args[0]
            assert isinstance(value, fx.Node)
            marks.append(node.next)
            node.replace_all_uses_with(value)
            graph.erase_node(node)
    return marks


def _unwrap_single_value(node: fx.Node) -> None:
    """The metadata of a leaf is a list; one that gives a tensor, not a tuple, is described by that tensor."""
    value = node.meta.get("val")
    taken_apart = any(user.target is operator.getitem for user in node.users)
    if node.op == "call_module" and not taken_apart and isinstance(value, (list, tuple)) and len(value) == 1:
        node.meta = {**node.meta, "val": value[0]}


def _gather_items(graph: fx.Graph) -> None:
    for node in list(graph.nodes):
        if node.target is not operator.getitem:
            _gather_items_of(node, node)


def _gather_items_of(node: fx.Node, place: fx.Node) -> fx.Node:
    """Moves items of a node, and items of these, behind ``place``; returns the last one."""
    for user in list(node.users):
        if user.op == "call_function" and user.target is operator.getitem and user.args[0] is node:
            place.append(user)
            place = _gather_items_of(user, user)
    return place


def _read_batch_size_from_inputs(graph: fx.Graph) -> None:
    inputs = [node for node in graph.nodes if node.op == "placeholder"]
    source = next((node for node in inputs if any(dim is not None for dim in batch_dims_of(node))), None)
    if source is None:
        return
    source_dim = batch_dims_of(source)[0]
    assert source_dim is not None
    for node in list(graph.nodes):
        multiple = _multiple_of_batch(node)
        if multiple is None:
            continue
        with graph.inserting_before(node):
            read = graph.call_function(torch.ops.aten.sym_size.int, (source, source_dim))
            read.meta = {**node.meta, "val": source.meta["val"].shape[source_dim]}
            if multiple != 1:
                read = graph.call_function(operator.mul, (read, multiple))
                read.meta = dict(node.meta)
        node.replace_all_uses_with(read)
        graph.erase_node(node)


def _multiple_of_batch(node: fx.Node) -> int | None:
    """How many times the number of samples the size is that a node reads from an intermediate value; else
    None.
    """
    if node.op != "call_function" or node.target is not torch.ops.aten.sym_size.int:
        return None
    argument, dim = node.args[0], node.args[1]
    if not isinstance(argument, fx.Node) or argument.op == "placeholder" or not isinstance(dim, int):
        return None
    sizes = argument.meta.get("sizes", ())
    match = _MULTIPLE_OF_BATCH.match(str(sizes[0][dim])) if sizes else None
    return int(match.group(1) or 1) if match else None
