"""Sections that do the same work on the same shapes: they share one measurement.

Two sections are alike if their graphs are the same operators on the same shapes. A section that is no graph is
like no other.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

from torch import Tensor, fx, nn

from varuna.partition import Partition, Section
from varuna.partition.program import GraphProgram


def kinds_of(partition: Partition) -> tuple[int, ...]:
    """Per section the number of its kind; kinds count from 0 in the order in which they first appear."""
    numbers: dict[str, int] = {}
    last = len(partition.sections) - 1
    texts = [_fingerprint(section, section.spec.index == last) for section in partition.sections]
    return tuple(numbers.setdefault(text, len(numbers)) for text in texts)


def shapes_digest(partition: Partition) -> str:
    """Hash of the partition and of the shape and kind of every parameter: what its costs depend on."""
    text = hashlib.sha256(partition.digest.encode())
    for section in partition.sections:
        described = [(name, _shape(parameter)) for name, parameter in section.parameters.items()]
        text.update(repr(described).encode())
    return text.hexdigest()


def _fingerprint(section: Section, is_last: bool) -> str:
    program = section.program
    if not isinstance(program, GraphProgram):
        return f"section {section.spec.index}"
    described = [
        is_last,  # the loss is its work too
        program.input_keys,
        [(spec.dtype, spec.differentiable, spec.shape, spec.batch_dim) for spec in section.received],
        [_shape(parameter) for parameter in program.parameters],
        [_shape(slot.get()) for slot in program.buffer_slots],
        [_shape(constant) for constant in program.constants],
        program.written,
        _nodes(program.module),
    ]
    return hashlib.sha256(repr(described).encode()).hexdigest()


def _shape(tensor: Tensor) -> tuple[str, tuple[int, ...], bool]:
    return str(tensor.dtype), tuple(tensor.shape), tensor.requires_grad


def _nodes(module: fx.GraphModule) -> list[Any]:
    """The graph with nodes named by position, so that equal graphs of different layers are equal."""
    positions = {node: f"%{index}" for index, node in enumerate(module.graph.nodes)}
    described: list[Any] = []
    for node in module.graph.nodes:
        arguments = fx.map_arg((node.args, node.kwargs), lambda used: positions[used])
        described.append([node.op, _target(module, node), arguments])
    return described


def _target(module: fx.GraphModule, node: fx.Node) -> Any:
    if node.op in ("placeholder", "output"):
        return node.op
    if node.op not in ("call_module", "get_attr"):
        return str(node.target)
    inner: Any = module
    for part in str(node.target).split("."):
        inner = getattr(inner, part)
    if isinstance(inner, fx.GraphModule):
        return _nodes(inner)
    if isinstance(inner, nn.Module):
        shapes: Sequence[Any] = [_shape(parameter) for parameter in inner.parameters()]
        return [type(inner).__module__, type(inner).__qualname__, repr(inner), shapes]
    return _shape(inner) if isinstance(inner, Tensor) else repr(inner)
