"""Tied parameters and buffers: several names, one tensor. The first name in the model's order stands for
all.
"""

from __future__ import annotations

from collections.abc import Iterable

from torch import Tensor, nn


def canonical_names(model: nn.Module) -> dict[str, str]:
    """Every parameter and buffer name to the first name of the same tensor object.

    Names come in the order of ``named_parameters()`` then ``named_buffers()``; ties are found by identity, any
    number of them and at any depth. A name that is not tied maps to itself.
    """
    names = _first_names(model.named_parameters(remove_duplicate=False))
    names.update(_first_names(model.named_buffers(remove_duplicate=False)))
    return names


def tied_groups(model: nn.Module) -> tuple[tuple[str, ...], ...]:
    """Names of each tensor that has more than one, canonical name first, in the model's order."""
    groups: dict[str, list[str]] = {}
    for name, canonical in canonical_names(model).items():
        groups.setdefault(canonical, []).append(name)
    return tuple(tuple(group) for group in groups.values() if len(group) > 1)


def _first_names(named: Iterable[tuple[str, Tensor]]) -> dict[str, str]:
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in named}
