"""Options of the optimizer's param groups, stored per parameter name and given back by name.

Every worker has all groups of the user's optimizer, whichever parameters it holds, so one worker's are
everyone's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer

from varuna.checkpoint.collect import EncodedState, encode_state
from varuna.checkpoint.errors import StateError
from varuna.checkpoint.manifest import listed
from varuna.checkpoint.tree import unflatten
from varuna.checkpoint.values import Json


def encode_options(optimizer: Optimizer, parameters: Mapping[str, nn.Parameter]) -> EncodedState:
    """Options of every param group, and which parameters they are for.

    Args:
        optimizer: the user's, over all parameters.
        parameters: all of the model, held here or not, by name.

    Raises:
        StateError: an option has no stored form.
    """
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    groups = [
        {
            "options": {key: value for key, value in group.items() if key not in ("params", "param_names")},
            "parameters": [name_of[id(parameter)] for parameter in group["params"]],
        }
        for group in optimizer.param_groups
    ]
    return encode_state(groups, "param groups")


def restore_options(
    optimizer: Optimizer,
    parameters: Mapping[str, nn.Parameter],
    stored: Json,
    tensors: Mapping[str, Tensor],
) -> None:
    """Give every param group the stored options of its parameters, in place.

    The groups need not be those that were saved, as long as the parameters of one group have had equal options.
    Options that were not stored (new ones of another version of torch) keep their value.

    Raises:
        StateError: a parameter was in no group, or the parameters of one group have had different options;
            nothing was changed then.
    """
    options_of: dict[str, Mapping[str, Any]] = {}
    for group in unflatten(stored, tensors, "the param groups"):
        options_of.update(dict.fromkeys(group["parameters"], group["options"]))
    name_of = {id(parameter): name for name, parameter in parameters.items()}
    chosen = [
        _common(index, [name_of[id(parameter)] for parameter in group["params"]], options_of)
        for index, group in enumerate(optimizer.param_groups)
    ]
    for group, options in zip(optimizer.param_groups, chosen, strict=True):
        for key, value in options.items():
            _assign(group, key, value)


def _common(index: int, names: list[str], options_of: Mapping[str, Mapping[str, Any]]) -> Mapping[str, Any]:
    """The options that all parameters of a group have had."""
    unknown = [name for name in names if name not in options_of]
    if unknown:
        raise StateError(
            f"The checkpoint has no options for {len(unknown)} parameters of the optimizer's group {index}: "
            f"{listed(unknown)}. Construct the optimizer over the parameters it had when this was saved."
        )
    if not names:
        return {}
    first = options_of[names[0]]
    for name in names[1:]:
        if options_of[name] is not first and not _equal(options_of[name], first):
            raise StateError(
                f"{names[0]!r} and {name!r} are in one param group (index {index}), but had different options "
                f"when this was saved: {first} and {options_of[name]}. Divide the param groups as they were."
            )
    return first


def _equal(left: Any, right: Any) -> bool:
    if isinstance(left, Tensor) and isinstance(right, Tensor):
        return torch.equal(left, right)
    if isinstance(left, Mapping) and isinstance(right, Mapping):
        return left.keys() == right.keys() and all(_equal(left[key], right[key]) for key in left)
    return type(left) is type(right) and bool(left == right)


def _assign(group: dict[str, Any], key: str, value: Any) -> None:
    """Into the tensor that is there, since a compiled or captured optimizer refers to it; else by value."""
    current = group.get(key)
    if isinstance(current, Tensor) and isinstance(value, Tensor | float | int):
        with torch.no_grad():
            current.fill_(value.item() if isinstance(value, Tensor) else value)
        return
    group[key] = value.clone() if isinstance(value, Tensor) else value
