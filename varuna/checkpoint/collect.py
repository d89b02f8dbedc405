"""What a worker has to save of a section: parameters, optimizer state, buffers. References, not copies."""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.checkpoint.errors import StateError
from varuna.checkpoint.layout import TensorForm
from varuna.checkpoint.names import buffer_name, job_name, optimizer_name, parameter_name
from varuna.checkpoint.tree import check_tensor, flatten, is_storable
from varuna.checkpoint.values import JOB_SECTION, Json


@dataclass(frozen=True, kw_only=True)
class SectionState:
    """Everything of one section that a checkpoint holds.

    Attributes:
        section_index: the section, or ``JOB_SECTION`` for what belongs to none.
        tensors: by stored name (see ``names``); the live tensors.
        values: optimizer state that is not a tensor, by stored name, as ``tree`` encodes it.
    """

    section_index: int
    tensors: Mapping[str, Tensor]
    values: Mapping[str, Json] = field(default_factory=dict)

    @property
    def sizes(self) -> dict[str, int]:
        """Bytes by name, for ``shares``; values have size 0."""
        return {name: tensor.nbytes for name, tensor in self.tensors.items()} | dict.fromkeys(self.values, 0)


@dataclass(frozen=True, kw_only=True)
class EncodedState:
    """State that is the same on every worker, as it goes into ``JobState`` and ``JOB_SECTION``."""

    json: Json
    tensors: Mapping[str, Tensor]


def section_state(
    section_index: int,
    parameters: Mapping[str, nn.Parameter],
    buffers: Mapping[str, Tensor],
    optimizer: Optimizer | None = None,
) -> SectionState:
    """The state of one section on a worker that holds it.

    Args:
        section_index: the section.
        parameters: those stored with it (a tied one with its first section only), by the user's name.
        buffers: likewise.
        optimizer: whose state goes with the parameters.

    Raises:
        StateError: something has no stored form; the message names parameter and key.
    """
    tensors: dict[str, Tensor] = {}
    values: dict[str, Json] = {}
    for name, buffer in buffers.items():
        if not is_storable(buffer):
            check_tensor(buffer, f"buffer {name!r}")
        tensors[buffer_name(name)] = buffer.detach()
    for name, parameter in parameters.items():
        if not is_storable(parameter):
            check_tensor(parameter, f"parameter {name!r}")
        tensors[parameter_name(name)] = parameter.detach()
        if optimizer is not None:
            _add_optimizer_state(tensors, values, name, optimizer.state.get(parameter, {}))
    return SectionState(section_index=section_index, tensors=tensors, values=values)


def encode_state(state: Any, *name: str) -> EncodedState:
    """State of something that is no part of a section: a scheduler, an object the user registered.

    Args:
        state: what its ``state_dict()`` returned.
        name: what it is, e.g. ``"registered", "ema"``.

    Raises:
        StateError: something in it has no stored form; the message has the path to it.
    """
    flat = flatten(state, functools.partial(job_name, *name), " ".join(name))
    return EncodedState(json=flat.json, tensors=flat.tensors)


def job_section(*states: EncodedState) -> SectionState:
    """The tensors of all such states, as a section to save."""
    tensors: dict[str, Tensor] = {}
    for state in states:
        tensors.update(state.tensors)
    return SectionState(section_index=JOB_SECTION, tensors=tensors)


def form_of(name: str, tensor: Tensor) -> TensorForm:
    """A tensor without its values."""
    return TensorForm(name=name, dtype=str(tensor.dtype).removeprefix("torch."), shape=tuple(tensor.shape))


def _add_optimizer_state(
    tensors: dict[str, Tensor], values: dict[str, Json], name: str, state: Mapping[Any, Any]
) -> None:
    for key, value in state.items():
        if not isinstance(key, str):
            raise StateError(
                f"The optimizer's state of parameter {name!r} has the key {key!r}, which is no text. Use text."
            )
        stored = optimizer_name(name, key)
        if isinstance(value, Tensor) and is_storable(value):
            tensors[stored] = value.detach() if value.requires_grad else value  # many, and each call costs
            continue
        where = f"optimizer state {key!r} of parameter {name!r}"
        if isinstance(value, Tensor):
            check_tensor(value, where)
        flat = flatten(value, functools.partial(_inside, stored), where)
        values[stored] = flat.json
        tensors.update(flat.tensors)


def _inside(stored: str, index: str) -> str:
    return f"{stored}/{index}"
