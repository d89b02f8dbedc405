"""What a section runs: a graph over the user's own tensors, or one of the user's modules as it is.

The hot path. A graph's parameters, buffers and constants are arguments of the generated function, so that a run
looks up nothing by name, a parameter whose storage was swapped in place is seen, and copies of buffers can be
handed in instead of the buffers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx, nn


@dataclass(frozen=True)
class BufferSlot:
    """Where a buffer lives: the user's module and its name there. ``None`` values cannot be in a graph."""

    name: str
    owner: nn.Module
    attribute: str

    def get(self) -> Tensor:
        """The buffer as it is now, also after ``module.to(...)`` replaced it."""
        value = self.owner._buffers[self.attribute]
        assert value is not None
        return value


def buffer_slot(model: nn.Module, name: str) -> BufferSlot:
    """The slot of a buffer by its dotted name."""
    path, _, attribute = name.rpartition(".")
    return BufferSlot(name, model.get_submodule(path), attribute)


@dataclass(frozen=True, kw_only=True, eq=False)
class GraphProgram:
    """A graph whose placeholders are: received values, inputs, parameters, buffers, constants, in this order.

    Attributes:
        module: the graph as a function; its children are opaque leaves and bodies of nested regions.
        input_keys: tensors of the batch.
        parameters: the user's own.
        buffer_slots: of the buffers that the graph itself reads.
        constants: tensors that are neither.
        written: indices into ``buffer_slots`` of buffers that forward changes.
        detached: those of ``written`` that are run on a copy and written back, because backward may need the
            values that they had.
        leaves: opaque leaves, which run in eval mode unless ``training``.
        leaf_slots: buffers inside opaque leaves.
    """

    module: fx.GraphModule
    input_keys: tuple[str, ...]
    parameters: tuple[nn.Parameter, ...]
    buffer_slots: tuple[BufferSlot, ...]
    constants: tuple[Tensor, ...]
    written: tuple[int, ...]
    detached: tuple[int, ...]
    leaves: tuple[nn.Module, ...]
    leaf_slots: tuple[BufferSlot, ...]
    training: bool
    num_received: int
    _function: Any = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_function", self.module.forward)

    def __call__(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], preserve: bool
    ) -> tuple[Tensor, ...]:
        """Forward; with ``preserve`` the model's buffers stay as they are."""
        buffers = [slot.get() for slot in self.buffer_slots]
        if not preserve and not self.detached and (self.training or not self.leaves):
            result: tuple[Tensor, ...] = self._function(*self._arguments(inputs, received, buffers))
            return result
        originals = list(buffers)
        for index in self.written if preserve else self.detached:
            buffers[index] = buffers[index].clone()
        with preserved(self.leaf_slots if preserve else ()), modules_mode(self.leaves, self.training):
            result = self._function(*self._arguments(inputs, received, buffers))
        if not preserve:
            with torch.no_grad():
                for index in self.detached:
                    originals[index].copy_(buffers[index])
        return result

    def trace(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor]
    ) -> tuple[list[tuple[str, Tensor]], tuple[Tensor, ...]]:
        """Forward, one operator at a time, buffers unchanged: (module path, value) in order, and what is
        sent.
        """
        buffers = [slot.get() for slot in self.buffer_slots]
        for index in self.written:
            buffers[index] = buffers[index].clone()
        recorder = _Recorder(self.module)
        with preserved(self.leaf_slots), modules_mode(self.leaves, self.training):
            sent = recorder.run(*self._arguments(inputs, received, buffers))
        return recorder.values, tuple(sent)

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that it reads, by the user's names."""
        return {slot.name: slot.get() for slot in (*self.buffer_slots, *self.leaf_slots)}

    def _arguments(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], buffers: Sequence[Tensor]
    ) -> list[Tensor]:
        assert len(received) == self.num_received, f"{len(received)} values given, {self.num_received} expected"
        return [
            *received,
            *[inputs[key] for key in self.input_keys],
            *self.parameters,
            *buffers,
            *self.constants,
        ]


@contextlib.contextmanager
def preserved(slots: Sequence[BufferSlot]) -> Iterator[None]:
    """Inside, the buffers in these slots are copies; afterwards the originals are back, untouched.

    Copying values back instead would count as a change of the originals, which autograd may hold.
    """
    originals = [slot.get() for slot in slots]
    for slot, original in zip(slots, originals, strict=True):
        slot.owner._buffers[slot.attribute] = original.clone()
    try:
        yield
    finally:
        for slot, original in zip(slots, originals, strict=True):
            slot.owner._buffers[slot.attribute] = original


@contextlib.contextmanager
def modules_mode(modules: Sequence[nn.Module], training: bool) -> Iterator[None]:
    """Inside, modules are as the user left them (training) or all in eval mode."""
    changed = [m for module in modules for m in module.modules() if m.training] if not training else []
    for module in changed:
        module.training = False
    try:
        yield
    finally:
        for module in changed:
            module.training = True


class _Recorder(fx.Interpreter):
    """Keeps a copy of every tensor that an operator gives."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module)
        self.values: list[tuple[str, Tensor]] = []

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if n.op in ("call_function", "call_module") and isinstance(value, Tensor):
            self.values.append((n.meta.get("module_path", ""), value.detach().clone()))
        return value
