"""Which nodes a section consists of, and the program made of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn

from varuna.partition.effects import is_subgraph
from varuna.partition.flow import Flow
from varuna.partition.graph import batch_dims_of, input_key
from varuna.partition.program import BufferSlot, GraphProgram, buffer_slot
from varuna.partition.ties import canonical_names


@dataclass(frozen=True, kw_only=True, eq=False)
class Members:
    """What belongs to one section.

    Attributes:
        start, end: its steps are ``[start, end)``.
        is_last: the model's outputs are what it sends.
        steps: nodes computed only here.
        needed: steps and free nodes, in graph order.
        batch_source: the value that the number of samples is read from, if anything needs it.
        received, sent: values at its two cuts.
        parameters: the user's own, by canonical name, those of leaves included.
        buffers: get_attr nodes of buffers, by canonical name.
        leaves: paths of opaque leaves.
        input_keys: of the batch.
    """

    start: int
    end: int
    is_last: bool
    steps: tuple[fx.Node, ...]
    needed: tuple[fx.Node, ...]
    batch_source: fx.Node | None
    received: tuple[fx.Node, ...]
    sent: tuple[fx.Node, ...]
    parameters: dict[str, nn.Parameter]
    buffers: dict[str, fx.Node]
    leaves: tuple[str, ...]
    input_keys: tuple[str, ...]


def members_of(flow: Flow, model: nn.Module, start: int, end: int) -> Members:
    """Collects what the steps ``[start, end)`` need."""
    is_last = end == len(flow.steps)
    steps = flow.steps[start:end]
    received = flow.live(start)
    outputs = [node for node in _flat(flow.output.args[0]) if isinstance(node, fx.Node)]
    needed = _needed(flow, [*steps, *(outputs if is_last else ())], start)
    source = _batch_source(received, needed)
    if source is not None and source.op == "placeholder" and source not in needed:
        needed = (source, *needed)
    leaves = tuple(dict.fromkeys(str(node.target) for node in steps if node.op == "call_module"))
    canonical = canonical_names(model)
    attributes = {
        canonical[str(node.target)]: node
        for node in needed
        if node.op == "get_attr" and str(node.target) in canonical
    }
    parameters = dict(model.named_parameters())
    names = {name for name in attributes if name in parameters}
    for path in leaves:
        inside = model.get_submodule(path).named_parameters()
        names |= {canonical[f"{path}.{name}" if path else name] for name, _ in inside}
    return Members(
        start=start,
        end=end,
        is_last=is_last,
        steps=steps,
        needed=needed,
        batch_source=source,
        received=received,
        sent=tuple(outputs) if is_last else flow.live(end),
        parameters={name: parameters[name] for name in parameters if name in names},
        buffers={name: node for name, node in attributes.items() if name not in parameters},
        leaves=leaves,
        input_keys=tuple(input_key(node) for node in needed if node.op == "placeholder"),
    )


def _flat(value: Any) -> tuple[Any, ...]:
    return tuple(value) if isinstance(value, (list, tuple)) else (value,)


def _needed(flow: Flow, roots: list[fx.Node], start: int) -> tuple[fx.Node, ...]:
    found: set[fx.Node] = set()
    stack = [node for node in roots if flow.step_index.get(node, start) >= start]
    while stack:
        node = stack.pop()
        if node in found:
            continue
        found.add(node)
        if reads_batch_size(node):
            continue
        stack += [n for n in node.all_input_nodes if flow.step_index.get(n, start) >= start]
        memory = flow.memory[node]
        if node in flow.free and memory.writers and node.op != "get_attr":
            stack += [*memory.nodes, *memory.writers]
    return tuple(sorted(found, key=flow.order.__getitem__))


def reads_batch_size(node: fx.Node) -> bool:
    """Whether a node only asks an input for the number of samples."""
    if node.op != "call_function" or node.target is not torch.ops.aten.sym_size.int:
        return False
    source, dim = node.args
    return isinstance(source, fx.Node) and source.op == "placeholder" and batch_dim(source) == dim


def batch_dim(node: fx.Node) -> int | None:
    """The dimension of a tensor whose size is the number of samples."""
    dims = batch_dims_of(node)
    return dims[0] if dims else None


def _batch_source(received: tuple[fx.Node, ...], needed: tuple[fx.Node, ...]) -> fx.Node | None:
    """Rather something that is there anyway than an input needed for nothing else."""
    readers = [node for node in needed if reads_batch_size(node)]
    if not readers:
        return None
    inputs = (node for node in needed if node.op == "placeholder")
    there = next((node for node in (*received, *inputs) if batch_dim(node) is not None), None)
    return there if there is not None else readers[0].all_input_nodes[0]


def emit_program(flow: Flow, model: nn.Module, members: Members) -> GraphProgram:
    """The section as a function; see ``GraphProgram`` for its arguments."""
    emitter = _Emitter(flow, model, members)
    emitter.emit()
    return emitter.program()


class _Emitter:
    def __init__(self, flow: Flow, model: nn.Module, members: Members) -> None:
        self._flow = flow
        self._model = model
        self._members = members
        self._graph = fx.Graph()
        self._made: dict[fx.Node, fx.Node] = {}
        self._modules: dict[str, nn.Module] = {}
        self._batch_size: fx.Node | None = None
        canonical = canonical_names(model)
        attributes = [n for n in members.needed if n.op == "get_attr"]
        self._subgraphs = [n for n in attributes if is_subgraph(n, flow.captured.subgraphs)]
        self._parameters = [n for n in attributes if canonical.get(str(n.target)) in members.parameters]
        self._buffers = list(members.buffers.items())
        self._constants = [n for n in attributes if str(n.target) in flow.captured.constants]

    def emit(self) -> None:
        """Writes the whole function."""
        inputs = [node for node in self._members.needed if node.op == "placeholder"]
        buffers = [node for _, node in self._buffers]
        arguments = [*self._members.received, *inputs, *self._parameters, *buffers, *self._constants]
        for index, node in enumerate(arguments):
            made = self._graph.placeholder(f"argument_{index}")
            made.meta = dict(node.meta)
            self._made[node] = made
        for node in (*self._members.received, *inputs):
            if self._is_written_here(node):
                made = self._graph.call_function(torch.ops.aten.clone.default, (self._made[node],))
                made.meta = dict(node.meta)
                self._made[node] = made
        for node in self._members.needed:
            if node not in self._made:
                self._made[node] = self._copy(node)
        self._graph.output(tuple(self._made[node] for node in self._members.sent))

    def _is_written_here(self, node: fx.Node) -> bool:
        steps = self._flow.step_index
        return any(
            self._members.start <= steps.get(writer, -1) < self._members.end
            for writer in self._flow.memory[node].writers
        )

    def _copy(self, node: fx.Node) -> fx.Node:
        if node in self._subgraphs:
            self._modules[str(node.target)] = self._flow.captured.subgraphs[str(node.target)]
        if reads_batch_size(node):
            return self._read_batch_size()
        made = self._graph.node_copy(node, self._made.__getitem__)
        if node.op == "call_module":
            made.target = f"leaf_{self._members.leaves.index(str(node.target))}"
            self._modules[made.target] = self._model.get_submodule(str(node.target))
        return made

    def _read_batch_size(self) -> fx.Node:
        if self._batch_size is None:
            source = self._members.batch_source
            assert source is not None
            self._batch_size = self._graph.call_function(
                torch.ops.aten.sym_size.int, (self._made[source], batch_dim(source))
            )
        return self._batch_size

    def program(self) -> GraphProgram:
        """The function with the tensors it is called with."""
        from varuna.partition.rules import writes_statistics_only

        written = [i for i, (_, node) in enumerate(self._buffers) if self._flow.memory[node].writers]
        detached = [
            i
            for i in written
            if _is_floating(self._buffers[i][1]) and not writes_statistics_only(self._flow, self._buffers[i][1])
        ]
        canonical = canonical_names(self._model)
        parameters = self._members.parameters
        return GraphProgram(
            module=fx.GraphModule(self._modules, self._graph, class_name="SectionGraph"),
            input_keys=self._members.input_keys,
            parameters=tuple(parameters[canonical[str(node.target)]] for node in self._parameters),
            buffer_slots=tuple(buffer_slot(self._model, name) for name, _ in self._buffers),
            constants=tuple(self._flow.captured.constants[str(node.target)] for node in self._constants),
            written=tuple(written),
            detached=tuple(detached),
            leaves=tuple(self._model.get_submodule(path) for path in self._members.leaves),
            training=self._flow.captured.training,
            leaf_slots=_leaf_slots(self._model, self._members.leaves),
            num_received=len(self._members.received),
        )


def _is_floating(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and (value.is_floating_point() or value.is_complex())


def _leaf_slots(model: nn.Module, leaves: tuple[str, ...]) -> tuple[BufferSlot, ...]:
    canonical: Mapping[str, str] = canonical_names(model)
    names = (
        canonical[f"{path}.{name}" if path else name]
        for path in leaves
        for name, _ in model.get_submodule(path).named_buffers()
    )
    return tuple(buffer_slot(model, name) for name in dict.fromkeys(names))
