"""Where each value of a captured graph comes from and where it is needed: what a cut must carry.

``Flow`` orders the *steps*: the nodes that are computed once, in program order. A cut is a position between
steps: position p has steps ``[0, p)`` before it. All other nodes are *free*: inputs, parameters and what
    depends only on inputs,
buffers and constants (no random numbers, no parameter, memory of its own): masks, position ids. They are
computed again in each section that needs them and never cross a cut.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate

from torch import Tensor, fx, nn

from varuna.partition.effects import RESHAPES, Effects, effects_of, is_subgraph
from varuna.partition.graph import CapturedGraph, values_of
from varuna.partition.tidy import tidy


@dataclass(eq=False)
class Memory:
    """Nodes that may share memory.

    Attributes:
        nodes: in graph order.
        writers: nodes that write to it, in graph order.
    """

    nodes: list[fx.Node] = field(default_factory=list)
    writers: list[fx.Node] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True, eq=False)
class Flow:
    """See the module's docstring.

    Attributes:
        captured: the graph, with ``graph`` replaced by a tidied copy.
        graph: the tidied copy.
        order: graph position of every node.
        steps: nodes computed once.
        step_index: their positions.
        last_use: for each step, the last step that reads it; ``len(steps)`` if the output does.
        effects: of every node.
        memory: of every node.
        free: all nodes that are recomputed where needed.
        marks: positions of the user's ``CutPoint`` calls, in order.
    """

    captured: CapturedGraph
    graph: fx.Graph
    order: dict[fx.Node, int]
    steps: tuple[fx.Node, ...]
    step_index: dict[fx.Node, int]
    last_use: tuple[int, ...]
    effects: dict[fx.Node, Effects]
    memory: dict[fx.Node, Memory]
    free: frozenset[fx.Node]
    marks: tuple[int, ...]

    @property
    def output(self) -> fx.Node:
        """The output node."""
        return self.graph.output_node()

    def live(self, position: int) -> tuple[fx.Node, ...]:
        """Values that cross a cut at ``position``, in the order they were computed."""
        return tuple(self.steps[i] for i in range(position) if self.last_use[i] >= position)

    def writes_after(self, node: fx.Node, position: int) -> bool:
        """Whether a step at or after ``position`` changes this value's memory in place."""
        return any(self.step_index.get(writer, -1) >= position for writer in self.memory[node].writers)

    @cached_property
    def live_bytes(self) -> tuple[int, ...]:
        """Bytes that cross a cut at each position ``0..len(steps)``, for one sample."""
        changes = [0] * (len(self.steps) + 2)
        for index, node in enumerate(self.steps):
            if self.last_use[index] > index:
                size = bytes_of(node, self.captured.example_batch_size)
                changes[index + 1] += size
                changes[self.last_use[index] + 1] -= size
        return tuple(accumulate(changes[:-1]))

    @cached_property
    def refusals(self) -> dict[int, str]:
        """Positions where no cut can be, and why."""
        found: dict[int, str] = {}
        for index, node in enumerate(self.steps):
            if not isinstance(node.meta.get("val"), Tensor):
                for position in range(index + 1, self.last_use[index] + 1):
                    found[position] = f"{node.name} is alive there and is not a tensor"
        for memory in self._written_memories():
            for position in self._shared_positions(memory):
                found[position] = (
                    f"{memory.writers[-1].name} later changes memory in place that several values alive there "
                    f"share"
                )
            for node in memory.nodes:
                if node.op == "get_attr":
                    first, last = self._extent(memory)
                    for position in range(first + 1, last + 1):
                        found[position] = f"it would divide the uses of {node.target}, which forward changes"
        return found

    @cached_property
    def clone_positions(self) -> frozenset[int]:
        """Positions where a value crosses that is changed in place afterwards, so that it must be copied
        first.
        """
        return frozenset(
            position
            for memory in self._written_memories()
            for writer in memory.writers
            for node in memory.nodes
            if node in self.step_index and writer in self.step_index
            for position in range(
                self.step_index[node] + 1,
                min(self.step_index[writer], self.last_use[self.step_index[node]]) + 1,
            )
        )

    def _written_memories(self) -> list[Memory]:
        return [memory for memory in dict.fromkeys(self.memory.values()) if memory.writers]

    def _shared_positions(self, memory: Memory) -> Iterator[int]:
        members = [self.step_index[node] for node in memory.nodes if node in self.step_index]
        writes = [self.step_index[node] for node in memory.writers if node in self.step_index]
        if len(members) < 2 or not writes:
            return
        for position in range(min(members) + 1, max(writes) + 1):
            if sum(index < position <= self.last_use[index] for index in members) > 1:
                yield position

    def _extent(self, memory: Memory) -> tuple[int, int]:
        touching = {*memory.nodes, *memory.writers, *(user for node in memory.nodes for user in node.users)}
        steps = [self.step_index[node] for node in touching if node in self.step_index]
        return (min(steps), max(steps)) if steps else (0, 0)


def flow_of(captured: CapturedGraph, model: nn.Module) -> Flow:
    """Analyses a captured graph. ``model`` tells parameters from buffers; only names are read."""
    graph, mark_nodes = tidy(captured)
    effects = {node: effects_of(node, captured.subgraphs) for node in graph.nodes}
    memory = _memories(graph, effects)
    parameter_names = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    free = _free_nodes(captured, graph, effects, memory, parameter_names)
    steps = tuple(node for node in graph.nodes if node not in free and node.op != "output")
    step_index = {node: index for index, node in enumerate(steps)}
    return Flow(
        captured=captured,
        graph=graph,
        order={node: index for index, node in enumerate(graph.nodes)},
        steps=steps,
        step_index=step_index,
        last_use=tuple(max((step_index.get(u, len(steps)) for u in n.users), default=-1) for n in steps),
        effects=effects,
        memory=memory,
        free=frozenset(free),
        marks=_mark_positions(graph, mark_nodes, step_index),
    )


def _memories(graph: fx.Graph, effects: dict[fx.Node, Effects]) -> dict[fx.Node, Memory]:
    memory: dict[fx.Node, Memory] = {}
    for node in graph.nodes:
        shared = [memory[argument] for argument in effects[node].aliases]
        kept = shared[0] if shared else Memory()
        for other in shared[1:]:
            if other is not kept:
                kept.nodes += other.nodes
                kept.writers += other.writers
                memory.update(dict.fromkeys(other.nodes, kept))
        kept.nodes.append(node)
        memory[node] = kept
        for written in effects[node].writes:
            memory[written].writers.append(node)
    return memory


def _free_nodes(
    captured: CapturedGraph,
    graph: fx.Graph,
    effects: dict[fx.Node, Effects],
    memory: dict[fx.Node, Memory],
    parameter_names: set[str],
) -> set[fx.Node]:
    """Memory that is written to is free as a whole or not at all; found by taking away until nothing
    changes.
    """
    bound: set[Memory] = {
        memory[node] for node in graph.nodes if node.op == "placeholder" and memory[node].writers
    }
    bound |= {
        memory[n]
        for n in graph.nodes
        if n.op == "get_attr" and memory[n].writers and str(n.target) not in captured.constants
    }
    while True:
        free = _free_given(
            captured,
            graph,
            effects=effects,
            memory=memory,
            parameter_names=parameter_names,
            bound=bound,
        )
        broken = {
            m
            for m in {id(m): m for m in memory.values()}.values()
            if m.writers and m not in bound and any(node not in free for node in (*m.nodes, *m.writers))
        }
        if not broken:
            return free
        bound |= broken


def _free_given(
    captured: CapturedGraph,
    graph: fx.Graph,
    *,
    effects: dict[fx.Node, Effects],
    memory: dict[fx.Node, Memory],
    parameter_names: set[str],
    bound: set[Memory],
) -> set[fx.Node]:
    free: set[fx.Node] = set()
    from_parameter: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "get_attr":
            free.add(node)
            if str(node.target) in parameter_names and not is_subgraph(node, captured.subgraphs):
                from_parameter.add(node)
        elif node.op == "placeholder":
            if memory[node] not in bound:
                free.add(node)
        elif node.op == "call_function":
            inputs = node.all_input_nodes
            if any(argument not in free for argument in inputs) or effects[node].random:
                continue
            touched = (node, *effects[node].writes, *inputs)
            if any(memory[n] in bound for n in touched):
                continue
            parameters = [argument for argument in inputs if argument in from_parameter]
            if parameters and node.target not in RESHAPES:
                continue
            free.add(node)
            if parameters:
                from_parameter.add(node)
    return free


def _mark_positions(
    graph: fx.Graph, marks: tuple[fx.Node | None, ...], step_index: dict[fx.Node, int]
) -> tuple[int, ...]:
    """A mark is the node it stands before (None: the output); its position, that of the next step."""
    positions: dict[fx.Node, int] = {}
    following = len(step_index)
    for node in reversed(graph.nodes):
        following = step_index.get(node, following)
        positions[node] = following
    return tuple(len(step_index) if node is None else positions[node] for node in marks)


def bytes_of(node: fx.Node, example_batch_size: int) -> int:
    """Bytes of a node's tensors for one sample; those that do not grow with the batch count whole."""
    total = 0
    sizes = node.meta.get("sizes", ())
    for index, value in enumerate(values_of(node)):
        grows = index < len(sizes) and any(isinstance(size, str) for size in sizes[index])
        total += value.numel() * value.element_size() // (example_batch_size if grows else 1)
    return total
