"""Parameters, optimizer state and buffers of a checkpoint, for a worker that needs some of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.checkpoint.errors import StateError
from varuna.checkpoint.find import Checkpoint
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.manifest import listed
from varuna.checkpoint.names import (
    BUFFERS,
    OPTIMIZER,
    PARAMETERS,
    buffer_name,
    parameter_name,
    split_name,
)
from varuna.checkpoint.tree import tensor_names, unflatten


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What was read, on the device it shall live on.

    Attributes:
        parameters: values by the user's name.
        states: each parameter's entry in ``optimizer.state``; empty for one that had none.
        buffers: values by the user's name.
    """

    parameters: Mapping[str, Tensor]
    states: Mapping[str, dict[str, Any]]
    buffers: Mapping[str, Tensor]


def check_fits(checkpoint: Checkpoint, parameters: Mapping[str, Tensor], buffers: Mapping[str, Tensor]) -> None:
    """Raise ``StateError`` unless the checkpoint is of a model like this one; nothing is read.

    Args:
        checkpoint: what would be restored.
        parameters: all of the model, on meta or not, by canonical name.
        buffers: likewise.
    """
    wanted = {parameter_name(name): value for name, value in parameters.items()}
    wanted |= {buffer_name(name): value for name, value in buffers.items()}
    stored = {name for name in checkpoint.places if split_name(name)[0] in (PARAMETERS, BUFFERS)}
    complaints = []
    if missing := [name for name in wanted if name not in stored]:
        complaints.append(f"the model has {listed(missing)}, the checkpoint does not")
    if unexpected := sorted(stored - set(wanted)):
        complaints.append(f"the checkpoint has {listed(unexpected)}, the model does not")
    for name in (name for name in wanted if name in stored):
        tensor = checkpoint.places[name].tensor
        there = f"{tensor.dtype}{list(tensor.shape)}"
        here = f"{str(wanted[name].dtype).removeprefix('torch.')}{list(wanted[name].shape)}"
        if here != there:
            complaints.append(f"{name} is {here} in the model and {there} in the checkpoint")
    if complaints:
        raise StateError(
            f"The checkpoint {checkpoint.store.url}/{checkpoint.directory} is of another model: "
            f"{'; '.join(complaints[:8])}. Build the model as it was when this was saved."
        )


def restore(
    checkpoint: Checkpoint,
    parameters: Mapping[str, nn.Parameter],
    buffers: Iterable[str],
    *,
    device: torch.device | str = "cpu",
    optimizer: Optimizer | None = None,
) -> Restored:
    """Read parameters with their optimizer state, and buffers.

    Args:
        checkpoint: where; ``check_fits`` said that it fits.
        parameters: those needed, by canonical name; they may be on the meta device and are not changed.
        buffers: canonical names of those needed.
        device: where values shall live.
        optimizer: decides where ``step`` counters live, as in torch: on the CPU, unless the param group is
            ``capturable`` or ``fused``. None: no optimizer state is read.

    Raises:
        DamagedCheckpoint, CheckpointError: see ``load.read_tensors``.
    """
    buffers = list(buffers)
    keys = _state_keys(checkpoint) if optimizer is not None else {}
    stored = [name for parameter in parameters for name in keys.get(parameter, {}).values()]
    values = {name: checkpoint.values[name] for name in stored if name in checkpoint.values}
    read = read_tensors(
        checkpoint,
        [
            *map(parameter_name, parameters),
            *map(buffer_name, buffers),
            *(name for name in stored if name not in values),
            *(name for value in values.values() for name in tensor_names(value)),
        ],
    )
    states: dict[str, dict[str, Any]] = {name: {} for name in parameters}
    for name, parameter in parameters.items():
        on_device = optimizer is not None and _counts_on_device(optimizer, parameter)
        for key, item in keys.get(name, {}).items():
            if item in values:
                value = unflatten(values[item], read, f"optimizer state {key!r} of {name!r}")
            else:
                value = read[item] if key == "step" and not on_device else read[item].to(device)
            states[name][key] = value
    return Restored(
        parameters={name: read[parameter_name(name)].to(device) for name in parameters},
        states=states,
        buffers={name: read[buffer_name(name)].to(device) for name in buffers},
    )


def _counts_on_device(optimizer: Optimizer, parameter: nn.Parameter) -> bool:
    for group in optimizer.param_groups:
        if any(member is parameter for member in group["params"]):
            return bool(group.get("capturable") or group.get("fused"))
    return False


def _state_keys(checkpoint: Checkpoint) -> dict[str, dict[str, str]]:
    """Per parameter: key of optimizer state to stored name."""
    keys: dict[str, dict[str, str]] = {}
    for stored in (*checkpoint.places, *checkpoint.values):
        pieces = split_name(stored)
        if pieces[0] == OPTIMIZER and len(pieces) == 3:  # longer ones are parts of a value
            keys.setdefault(pieces[1], {})[pieces[2]] = stored
    return keys
