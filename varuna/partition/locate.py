"""Finds the first section whose values differ from the model's own."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from varuna.partition.section import Partition

Trace = list[tuple[str, Tensor]]


@dataclass(frozen=True)
class _Value:
    order: int
    section_index: int
    tensor: Tensor


def first_difference(
    model: nn.Module,
    partition: Partition,
    traced: Sequence[Trace],
    *,
    run_plain: Callable[[], None],
    tolerance: float,
    differing: set[str],
) -> str:
    """Which section differs first, in words.

    What each module returned in the model's own forward is looked for among the values that the graph computed
    in that module. Modules are taken in the order in which the graph leaves them; the first without its value
    differs.

    Args:
        model: the user's, undivided.
        partition: the divided one.
        traced: per section, (module path, value) of every operator.
        run_plain: runs the model's forward once.
        tolerance: relative difference that is none.
        differing: parameters whose gradients differ; tells the section if forward agrees everywhere.
    """
    returned = _module_outputs(model, run_plain)
    inside: dict[str, list[_Value]] = {}
    order = 0
    for section_index, values in enumerate(traced):
        for path, tensor in values:
            order += 1
            for prefix in _prefixes(path):
                inside.setdefault(prefix, []).append(_Value(order, section_index, tensor))
    left = sorted((path for path in returned if path in inside), key=lambda path: inside[path][-1].order)
    for path in left:
        for output in returned[path]:
            alike = [value for value in inside[path] if value.tensor.shape == output.shape]
            if alike and not any(_is_close(value.tensor, output, tolerance) for value in alike):
                return _in_words(partition, alike[-1].section_index, f"what module {path!r} returns")
    for section in reversed(partition.sections):
        names = [name for name in section.parameters if name in differing and _num_users(partition, name) == 1]
        if names:
            return _in_words(
                partition, section.spec.index, f"the gradient of {names[-1]!r} (its forward agrees)"
            )
    return _in_words(partition, len(partition.sections) - 1, "the loss")


def _num_users(partition: Partition, name: str) -> int:
    """Sections that use a parameter; the gradient of a tied one differs wherever the fault is."""
    return sum(name in section.parameters for section in partition.sections)


def _in_words(partition: Partition, section_index: int, what: str) -> str:
    return f"section {section_index} ({partition.sections[section_index].spec.name}), in {what}"


def _module_outputs(model: nn.Module, run_plain: Callable[[], None]) -> dict[str, list[Tensor]]:
    returned: dict[str, list[Tensor]] = {}
    handles = []

    def keep(path: str) -> Callable[[nn.Module, Any, Any], None]:
        def hook(module: nn.Module, args: Any, output: Any) -> None:
            for leaf in pytree.tree_leaves(output):
                if isinstance(leaf, Tensor) and leaf.is_floating_point():
                    returned.setdefault(path, []).append(leaf.detach().clone())

        return hook

    for path, module in model.named_modules():
        if path:
            handles.append(module.register_forward_hook(keep(path)))
    try:
        run_plain()
    finally:
        for handle in handles:
            handle.remove()
    return returned


def _prefixes(path: str) -> list[str]:
    parts = path.split(".") if path else []
    return [".".join(parts[:length]) for length in range(1, len(parts) + 1)]


def _is_close(found: Tensor, expected: Tensor, tolerance: float) -> bool:
    if expected.numel() == 0 or not found.is_floating_point():
        return True
    scale = float(expected.abs().max())
    difference = (found.to(torch.float64) - expected.to(torch.float64)).abs().max()
    return float(difference) <= tolerance * max(scale, torch.finfo(torch.float32).tiny)
