"""Which values a gradient may come back for."""

from __future__ import annotations

import torch
from torch import fx, nn

from varuna.partition.flow import Flow
from varuna.partition.graph import values_of

_STOPS = {torch.ops.aten.detach.default, torch.ops.aten.detach_.default}


def differentiable_nodes(flow: Flow, model: nn.Module) -> set[fx.Node]:
    """Floating values that depend on a parameter that requires a gradient now, not through ``detach`` or
    ``no_grad``.
    """
    trainable = {name for name, p in model.named_parameters(remove_duplicate=False) if p.requires_grad}
    found: set[fx.Node] = set()
    for node in flow.graph.nodes:
        if node.op == "get_attr":
            starts = str(node.target) in trainable
        elif node.op == "call_module":
            leaf = model.get_submodule(str(node.target))
            starts = any(p.requires_grad for p in leaf.parameters())
        else:
            starts = False
        depends = starts or any(argument in found for argument in node.all_input_nodes)
        if not depends or node.op == "output" or _stops(node):
            continue
        values = values_of(node)
        if not values or any(value.is_floating_point() or value.is_complex() for value in values):
            found.add(node)
        for written in flow.effects[node].writes:
            found.update(flow.memory[written].nodes)
    return {node for node in found if any(v.is_floating_point() or v.is_complex() for v in values_of(node))}


def _stops(node: fx.Node) -> bool:
    if node.target in _STOPS:
        return True
    name = getattr(node.target, "__name__", "")
    return name == "wrap_with_set_grad_enabled" and node.args[0] is False
