"""A section that runs some of the user's modules as they are, one after another, without a captured graph."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.errors import RunError
from varuna.partition.loss import read_output
from varuna.partition.loss_fn import LossFunction
from varuna.partition.program import BufferSlot, modules_mode, preserved
from varuna.partition.signature import Node, rebuild


@dataclass(frozen=True)
class Structure:
    """What one module hands to the next: a pytree in which ``None`` of ``tensors`` marks where constants are.

    Attributes:
        tree: of the whole value.
        constants: for each leaf, None for a tensor, else the constant in a 1-tuple.
    """

    tree: pytree.TreeSpec
    constants: tuple[tuple[Any] | None, ...]

    @classmethod
    def of(cls, value: Any) -> Structure:
        """The structure of a value."""
        leaves, tree = pytree.tree_flatten(value)
        return cls(tree, tuple(None if isinstance(leaf, Tensor) else (leaf,) for leaf in leaves))

    def build(self, tensors: Sequence[Tensor]) -> Any:
        """The value again, from its tensors."""
        given = iter(tensors)
        leaves = [next(given) if constant is None else constant[0] for constant in self.constants]
        return pytree.tree_unflatten(leaves, self.tree)

    @property
    def num_tensors(self) -> int:
        """How many of the leaves are tensors."""
        return sum(constant is None for constant in self.constants)


def tensors_of(value: Any) -> tuple[Tensor, ...]:
    """Tensors of a value, in order."""
    return tuple(leaf for leaf in pytree.tree_leaves(value) if isinstance(leaf, Tensor))


@dataclass(frozen=True, kw_only=True, eq=False)
class ModulesProgram:
    """Modules in order: the first takes the batch (first section) or what was received.

    Attributes:
        paths, modules: the user's, in order.
        training: whether they run in train mode (as the user left them) or in eval mode.
        entry: the model's input in the batch's tree, on the first section; else None.
        received: structure of what is received, None on the first section.
        sent: structure of what is sent, None on the last section, which sends the loss.
        clones: indices of received tensors that a module changes in place.
        loss_fn, rest: on the last section, the loss function and the parts of the batch that go to it.
        slots: buffers.
    """

    paths: tuple[str, ...]
    modules: tuple[nn.Module, ...]
    training: bool
    entry: Node | None
    received: Structure | None
    sent: Structure | None
    clones: tuple[int, ...]
    loss_fn: LossFunction | None
    rest: tuple[Node, ...]
    slots: tuple[BufferSlot, ...]

    def __call__(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], preserve: bool
    ) -> tuple[Tensor, ...]:
        """Forward; with ``preserve`` the model's buffers stay as they are."""
        with preserved(self.slots if preserve else ()), modules_mode(self.modules, self.training):
            value = self._entry_value(inputs, received)
            for module in self.modules:
                value = module(value)
            return self._results(inputs, value)

    def trace(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor]
    ) -> tuple[list[tuple[str, Tensor]], tuple[Tensor, ...]]:
        """Forward, buffers unchanged: (module path, value) after every module, and what is sent."""
        values: list[tuple[str, Tensor]] = []
        with preserved(self.slots), modules_mode(self.modules, self.training):
            value = self._entry_value(inputs, received)
            for path, module in zip(self.paths, self.modules, strict=True):
                value = module(value)
                values += [(path, tensor.detach().clone()) for tensor in tensors_of(value)]
            return values, self._results(inputs, value)

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that it reads, by the user's names."""
        return {slot.name: slot.get() for slot in self.slots}

    def _entry_value(self, inputs: Mapping[str, Tensor], received: Sequence[Tensor]) -> Any:
        if self.received is None:
            assert self.entry is not None
            return rebuild(self.entry, inputs)
        tensors = [value.clone() if i in self.clones else value for i, value in enumerate(received)]
        return self.received.build(tensors)

    def _results(self, inputs: Mapping[str, Tensor], value: Any) -> tuple[Tensor, ...]:
        if self.sent is None:
            output = value
            if self.loss_fn is not None:
                output = self.loss_fn(value, *(rebuild(node, inputs) for node in self.rest))
            return read_output(output)[1]
        tensors = tensors_of(value)
        if len(tensors) != self.sent.num_tensors:
            raise RunError(
                f"Module {self.paths[-1]!r} returned {len(tensors)} tensors, but {self.sent.num_tensors} when "
                f"the "
                "model was divided. A module before a cut must always return the same number of tensors."
            )
        return tensors
