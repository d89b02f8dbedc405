"""Measures what the end of a step costs per parameter: gradient norm, division, the optimizer; and its state.

The user's optimizer is not touched: another one of the same class and options works on tensors made for it.
"""

from __future__ import annotations

import inspect
import math
import statistics
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from varuna.partition import Section

_LARGE_ELEMENTS = 1 << 21
_SMALL_WIDTH = 16
_NUM_SMALL = 8
_NUM_REPEATS = 3
_GUESSED_COPIES = 2
"""State of an optimizer that cannot be made again, in copies of its parameters: two moments, as Adam's."""


@dataclass(frozen=True, kw_only=True)
class UpdateCosts:
    """Of parameters of one group and dtype.

    Attributes:
        tensor_s: seconds per parameter tensor, whatever its size.
        element_s: seconds per element.
        state_bytes: bytes of optimizer state per element.
    """

    tensor_s: float
    element_s: float
    state_bytes: float


class UpdateMeasure:
    """Costs of updating parameters, measured once per group and dtype.

    Args:
        optimizer: the user's.
        device: where updates happen.

    Attributes:
        notes: what could not be measured, for people.
    """

    def __init__(self, optimizer: Optimizer, device: torch.device) -> None:
        self.notes: list[str] = []
        self._optimizer = optimizer
        self._device = device
        self._group_of = {id(p): group for group in optimizer.param_groups for p in group["params"]}
        self._known: dict[tuple[int, torch.dtype], UpdateCosts] = {}
        self._largest = max((p.numel() for group in optimizer.param_groups for p in group["params"]), default=1)

    def section(self, section: Section) -> tuple[float, int]:
        """Seconds to update a section's parameters, and bytes of optimizer state for them."""
        seconds, state = 0.0, 0.0
        for parameter in _trained(section.parameters.values()):
            group = self._group_of.get(id(parameter))
            if group is not None:
                costs = self._costs(group, parameter.dtype)
                seconds += costs.tensor_s + costs.element_s * parameter.numel()
                state += costs.state_bytes * parameter.numel()
        return seconds, round(state)

    def _costs(self, group: Mapping[str, Any], dtype: torch.dtype) -> UpdateCosts:
        key = (id(group), dtype)
        if key not in self._known:
            try:
                self._known[key] = _measure(self._optimizer, group, dtype, self._device, self._largest)
            except (
                Exception
            ) as error:  # somebody's optimizer: any of its classes may want more than its options
                name = type(self._optimizer).__name__
                self.notes.append(
                    f"{name} cannot be made again from its options ({error}): its state is taken to be "
                    f"{_GUESSED_COPIES} copies of the parameters, its time unknown."
                )
                self._known[key] = UpdateCosts(
                    tensor_s=0.0, element_s=0.0, state_bytes=float(_GUESSED_COPIES * dtype.itemsize)
                )
        return self._known[key]


def gradient_bytes(section: Section) -> int:
    """Bytes of the gradients of a section's parameters."""
    return sum(parameter.nbytes for parameter in _trained(section.parameters.values()))


def options_text(optimizer: Optimizer) -> str:
    """What the costs depend on: the class and which options are on; not learning rates, say."""
    kinds = [
        {key: bool(value) for key, value in group.items() if isinstance(value, (bool, int, float, type(None)))}
        for group in optimizer.param_groups
    ]
    return f"{type(optimizer).__module__}.{type(optimizer).__qualname__} {kinds}"


def _trained(parameters: Iterable[nn.Parameter]) -> list[nn.Parameter]:
    return [parameter for parameter in parameters if parameter.requires_grad]


def _measure(
    optimizer: Optimizer, group: Mapping[str, Any], dtype: torch.dtype, device: torch.device, largest: int
) -> UpdateCosts:
    width = max(_SMALL_WIDTH, math.isqrt(min(largest, _LARGE_ELEMENTS)))
    small = [_parameter(_SMALL_WIDTH, dtype, device) for _ in range(_NUM_SMALL)]
    large = [_parameter(width, dtype, device)]
    small_s, _ = _updates(optimizer, group, small)
    large_s, state_bytes = _updates(optimizer, group, large)
    tensor_s = small_s / len(small)
    return UpdateCosts(
        tensor_s=tensor_s, element_s=max(0.0, large_s - tensor_s) / width**2, state_bytes=state_bytes / width**2
    )


def _parameter(width: int, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    parameter = nn.Parameter(torch.ones(width, width, dtype=dtype, device=device))
    parameter.grad = torch.full_like(parameter, 1e-3)
    return parameter


def _updates(
    optimizer: Optimizer, group: Mapping[str, Any], parameters: list[nn.Parameter]
) -> tuple[float, int]:
    """Median seconds of norm, division and step for these parameters, and the bytes of state they then have."""
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in group.items() if key != "params" and key in accepted}
    twin = type(optimizer)(parameters, **options)
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    seconds = []
    for _ in range(1 + _NUM_REPEATS):
        _finish(parameters[0].device)
        started_s = time.perf_counter()
        torch._foreach_norm(gradients, 2)
        torch._foreach_mul_(gradients, 1.0)
        twin.step()
        _finish(parameters[0].device)
        seconds.append(time.perf_counter() - started_s)
    state = [value for entry in twin.state.values() for value in entry.values()]
    return statistics.median(seconds[1:]), sum(v.nbytes for v in state if isinstance(v, torch.Tensor))


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
