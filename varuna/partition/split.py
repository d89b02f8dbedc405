"""Cuts a captured graph into sections.

``sections[i]`` holds the steps between two cut positions, the free nodes that these need (computed again rather
than received, see ``flow.py``), and passes on what later sections need of earlier ones.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from torch import Tensor, fx, nn

from varuna.partition.autocut import Position
from varuna.partition.costs import flops_of
from varuna.partition.differentiable import differentiable_nodes
from varuna.partition.emit import Members, emit_program, members_of
from varuna.partition.flow import Flow, bytes_of
from varuna.partition.graph import batch_dims_of
from varuna.partition.rules import buffer_rules
from varuna.partition.section import Partition, Section, ValueSpec
from varuna.partition.ties import canonical_names
from varuna.spec import SectionSpec


def split(model: nn.Module, flow: Flow, cut_points: Sequence[Position]) -> Partition:
    """Cuts at the given positions (ascending, none of them in ``flow.refusals``)."""
    bounds = [0, *cut_points, len(flow.steps)]
    differentiable = differentiable_nodes(flow, model)
    sections: list[Section] = []
    for index in range(len(bounds) - 1):
        members = members_of(flow, model, bounds[index], bounds[index + 1])
        previous = sections[-1].spec.name if sections else ""
        sections.append(
            _section(flow, model, members, index=index, previous_name=previous, differentiable=differentiable)
        )
    return Partition(
        sections=tuple(sections),
        digest=digest_of_cuts(flow, model, cut_points),
        signature=flow.captured.signature,
        training=flow.captured.training,
        output_spec=flow.captured.output_spec,
        dynamic_batch=flow.captured.dynamic_batch,
        example_batch_size=flow.captured.example_batch_size,
    )


def _section(
    flow: Flow,
    model: nn.Module,
    members: Members,
    *,
    index: int,
    previous_name: str,
    differentiable: set[fx.Node],
) -> Section:
    example = flow.captured.example_batch_size
    sent = members.sent if not members.is_last else ()
    spec = SectionSpec(
        index=index,
        name=section_name(members.steps, previous_name) or f"section {index}",
        parameter_names=tuple(members.parameters),
        parameter_bytes=sum(p.numel() * p.element_size() for p in members.parameters.values()),
        forward_flops=sum(flops_of(n, flow.captured.subgraphs, model) for n in members.steps) / example,
        output_bytes=sum(bytes_of(node, example) for node in sent),
    )
    return Section(
        spec=spec,
        parameters=members.parameters,
        mutated_buffers=buffer_rules(flow, model, members),
        input_keys=members.input_keys,
        received=tuple(value_spec(node, differentiable) for node in members.received),
        sent=tuple(value_spec(node, differentiable) for node in members.sent),
        uses_random=any(flow.effects[node].random for node in members.steps),
        activation_bytes=sum(bytes_of(node, example) for node in members.steps),
        program=emit_program(flow, model, members),
    )


def value_spec(node: fx.Node, differentiable: set[fx.Node]) -> ValueSpec:
    """What the neighbours need to know of a value."""
    value = node.meta["val"]
    assert isinstance(value, Tensor)
    dims = batch_dims_of(node)
    return ValueSpec(
        name=node.name,
        dtype=value.dtype,
        differentiable=node in differentiable,
        shape=tuple(value.shape),
        batch_dim=dims[0] if dims else None,
    )


def section_name(steps: Sequence[fx.Node], previous: str) -> str:
    """The first module, up to its number in a list (``transformer.h.3``); one level deeper if that is taken."""
    path = next((p for node in steps if (p := node.meta.get("module_path", ""))), "")
    parts = path.split(".")
    numbers = [position for position, part in enumerate(parts) if part.isdigit()]
    length = numbers[-1] + 1 if numbers else len(parts)
    name = ".".join(parts[:length])
    while length < len(parts) and (previous == name or previous.startswith(name + ".")):
        length += 1
        name = ".".join(parts[:length])
    return name


def digest_of_cuts(flow: Flow, model: nn.Module, cut_points: Sequence[Position]) -> str:
    """sha256 of the graph, the cuts and the parameters' names and shapes: the same on every worker."""
    numbers = {node: f"%{index}" for node, index in flow.order.items()}
    text = hashlib.sha256()
    for node in flow.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda n: _Text(numbers[n]))
        text.update(f"{node.op} {node.target} {arguments}\n".encode())
    for name, body in sorted(flow.captured.subgraphs.items()):
        text.update(f"{name}: {body.graph}\n".encode())
    canonical = canonical_names(model)
    for name, parameter in model.named_parameters(remove_duplicate=False):
        text.update(f"{name} {canonical[name]} {tuple(parameter.shape)} {parameter.dtype}\n".encode())
    text.update(f"{tuple(cut_points)} {flow.captured.training} {flow.captured.signature.to_json()}".encode())
    return text.hexdigest()


class _Text(str):
    """Printed without quotes inside of containers."""

    __slots__ = ()

    def __repr__(self) -> str:
        return str(self)
