"""What there is to a section besides its code: parameters, buffers, optimizer state; taken out and put in.

The header says in words what the tensors are, in the same order; numbers of the optimizer's state are in the
header itself. No pickle: an optimizer whose state holds anything but tensors and JSON's values is refused.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any, Literal

import msgspec
import torch
from torch import Tensor, nn

from varuna.errors import OptimizerError
from varuna.partition import canonical_names
from varuna.partition.materialise import set_storage
from varuna.run.holders import section_parameters
from varuna.run.parameters import ParameterHolding, ParameterState
from varuna.run.partitions import Partitions
from varuna.run.tensor_bytes import DTYPES, TensorInfo, info_of

Scalar = bool | int | float | str | None


class TensorEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One tensor of a section.

    Attributes:
        kind: ``state`` is the optimizer's.
        name: of the parameter or buffer; for ``state`` of the parameter it belongs to.
        key: for ``state``: its name in the optimizer's entry.
        info: type and shape.
        on_device: whether it lives on the worker's device; False for the step counters that stay on the CPU.
    """

    kind: Literal["parameter", "buffer", "state"]
    name: str
    key: str = ""
    info: TensorInfo
    on_device: bool = True


class ScalarEntry(msgspec.Struct, frozen=True, kw_only=True):
    """A number of the optimizer's state."""

    name: str
    key: str
    value: Scalar


class StateHeader(msgspec.Struct, frozen=True, kw_only=True):
    """Everything about a section's state but the contents of its tensors."""

    tensors: tuple[TensorEntry, ...]
    scalars: tuple[ScalarEntry, ...]


class SectionStates:
    """The state of sections on this worker.

    Args:
        model: the user's.
        holding: its parameters and their optimizer state.
        partitions: what belongs to which section.
        device: where this worker computes.
    """

    def __init__(
        self, model: nn.Module, holding: ParameterHolding, partitions: Partitions, device: torch.device
    ) -> None:
        self._holding = holding
        self._partitions = partitions
        self._device = device
        canonical = canonical_names(model)
        self._buffers = {canonical.get(name, name): buffer for name, buffer in model.named_buffers()}

    def names(self, section_index: int) -> tuple[str, ...]:
        """Parameters and buffers of a section, in one order everywhere; unused ones go with the first."""
        buffers = self._partitions.reference.sections[section_index].buffers
        return tuple(dict.fromkeys([*section_parameters(self._partitions, section_index), *buffers]))

    def missing(self, section_index: int, fresh: Collection[str]) -> tuple[str, ...]:
        """Names of a section that are not here: parameters without storage, buffers not in ``fresh``."""
        held = self._holding.held
        return tuple(name for name in self.names(section_index) if name not in held and name not in fresh)

    def take_out(self, names: Sequence[str]) -> tuple[StateHeader, list[Tensor]]:
        """The state of some parameters and buffers: the tensors themselves, not copies.

        Raises:
            OptimizerError: the optimizer's state holds something that is neither tensor nor number.
        """
        entries: list[TensorEntry] = []
        scalars: list[ScalarEntry] = []
        tensors: list[Tensor] = []
        held = self._holding.held
        for name in names:
            tensor = held.get(name, self._buffers.get(name))
            assert tensor is not None, f"{name} is not held here"
            kind: Literal["parameter", "buffer"] = "parameter" if name in held else "buffer"
            entries.append(TensorEntry(kind=kind, name=name, info=info_of(tensor)))
            tensors.append(tensor.detach())
            if kind == "buffer":
                continue
            for key, value in self._holding.state_of(name).items():
                if isinstance(value, Tensor):
                    on_device = value.device.type == self._device.type
                    entries.append(
                        TensorEntry(kind="state", name=name, key=key, info=info_of(value), on_device=on_device)
                    )
                    tensors.append(value.detach())
                else:
                    scalars.append(ScalarEntry(name=name, key=key, value=_scalar(name, key, value)))
        return StateHeader(tensors=tuple(entries), scalars=tuple(scalars)), tensors

    def empty(self, header: StateHeader) -> list[Tensor]:
        """Memory for the tensors of a header, where they shall live."""
        return [
            torch.empty(
                entry.info.shape,
                dtype=DTYPES[entry.info.dtype],
                device=self._device if entry.on_device else torch.device("cpu"),
            )
            for entry in header.tensors
        ]

    def put_in(self, header: StateHeader, tensors: Sequence[Tensor]) -> None:
        """Make these tensors the state of their parameters and buffers; parameters then are held here."""
        values: dict[str, Tensor] = {}
        states: dict[str, ParameterState] = {}
        for entry, tensor in zip(header.tensors, tensors, strict=True):
            if entry.kind == "parameter":
                values[entry.name] = tensor
                states.setdefault(entry.name, {})
            elif entry.kind == "state":
                states.setdefault(entry.name, {})[entry.key] = tensor
            else:
                self.set_buffer(entry.name, tensor)
        for scalar in header.scalars:
            states[scalar.name][scalar.key] = scalar.value
        self._holding.hold(values, states)

    def set_buffer(self, name: str, value: Tensor) -> None:
        """Give a buffer this value; its canonical name is one of the model's."""
        buffer = self._buffers[name]
        if buffer.device == value.device:
            with torch.no_grad():
                buffer.copy_(value)
        else:
            set_storage(buffer, value)


def encode_header(header: StateHeader) -> bytes:
    """JSON of a header."""
    return msgspec.json.encode(header)


def decode_header(data: bytes) -> StateHeader:
    """What ``encode_header`` wrote; ``msgspec.ValidationError`` for anything else."""
    return msgspec.json.decode(data, type=StateHeader)


def _scalar(name: str, key: str, value: Any) -> Scalar:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    raise OptimizerError(
        f"The optimizer keeps {key!r} of parameter {name!r} as a {type(value).__name__}, which cannot be "
        f"handed to another worker. State must be tensors and numbers, as in torch.optim."
    )
