"""Whose parameters live here: they gain and lose storage in place, and their optimizer state goes with them.

A parameter that is not held is on the meta device: shape and dtype, no storage. ``torch.utils.swap_tensors``
changes that inside the same ``nn.Parameter`` object, so the user's references, the optimizer's param
groups, schedulers and ties stay valid. Names are those of ``model.named_parameters()``; a tied weight has its
first one.
"""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils import swap_tensors

from varuna.errors import RunError
from varuna.partition.materialise import forget_weak_references
from varuna.run.optimizer import fresh_state, group_of, has_state_from_constructor

ParameterState = dict[str, Any]
"""One parameter's entry in ``optimizer.state``: tensors and numbers by name."""


class ParameterHolding:
    """Which parameters have storage on this worker.

    Args:
        model: parameters on the meta device are not held, all others are.
        optimizer: whose state follows them, or None.
    """

    def __init__(self, model: nn.Module, optimizer: Optimizer | None = None) -> None:
        forget_weak_references(model)
        self._parameters = dict(model.named_parameters())
        self._optimizer = optimizer
        self._constructor_makes_state = optimizer is not None and has_state_from_constructor(optimizer)

    @property
    def held(self) -> dict[str, nn.Parameter]:
        """The parameters with storage here, by name, in the model's order."""
        return {name: p for name, p in self._parameters.items() if p.device.type != "meta"}

    def hold(
        self,
        values: Mapping[str, torch.Tensor],
        states: Mapping[str, ParameterState] | None = None,
    ) -> None:
        """Give parameters these values as storage (not copied), and their optimizer state.

        Args:
            values: by name, of the parameter's shape and dtype, on the device it shall live on.
            states: by name; for a name without one, state is as the optimizer's constructor would make it.

        Raises:
            RunError: see ``release``.
        """
        _let_go_of_weak_references(self._parameters[name] for name in values)
        for name, value in values.items():
            parameter = self._parameters[name]
            assert value.shape == parameter.shape, (name, value.shape, parameter.shape)
            assert value.dtype == parameter.dtype, (name, value.dtype, parameter.dtype)
            _swap(name, parameter, value.detach())
        self.adopt(values, states)

    def adopt(self, names: Iterable[str], states: Mapping[str, ParameterState] | None = None) -> None:
        """Set the optimizer state of parameters that were given storage by someone else (materialised)."""
        optimizer = self._optimizer
        if optimizer is None:
            return
        for name in names:
            parameter = self._parameters[name]
            state = (states or {}).get(name)
            if state is None:
                state = self._initial_state(optimizer, parameter)
            optimizer.state.pop(parameter, None)
            if state:
                optimizer.state[parameter] = state

    def release(self, names: Iterable[str]) -> None:
        """Take storage, gradient and optimizer state of these parameters away; their memory is returned.

        Raises:
            RunError: something still refers to a parameter's storage, such as the graph of a loss.
        """
        names = list(names)
        _let_go_of_weak_references(self._parameters[name] for name in names)
        for name in names:
            parameter = self._parameters[name]
            if self._optimizer is not None:
                self._optimizer.state.pop(parameter, None)
            parameter.grad = None
            if parameter.device.type != "meta":
                _swap(name, parameter, torch.empty_like(parameter, device="meta"))

    def keep_only(self, names: Iterable[str]) -> None:
        """Release all parameters but these."""
        kept = set(names)
        self.release([name for name in self.held if name not in kept])

    def state_of(self, name: str) -> ParameterState:
        """The optimizer's own entry for a parameter (empty before its first step); not a copy."""
        if self._optimizer is None:
            return {}
        return dict(self._optimizer.state.get(self._parameters[name], {}))

    def _initial_state(self, optimizer: Optimizer, parameter: nn.Parameter) -> ParameterState:
        if not self._constructor_makes_state:
            return {}
        group = group_of(optimizer, parameter)
        return {} if group is None else fresh_state(optimizer, parameter, group)


def _let_go_of_weak_references(parameters: Iterable[nn.Parameter]) -> None:
    """Collect dead cycles (fake-tensor modes of a finished capture) that still refer weakly to parameters."""
    if any(weakref.getweakrefcount(parameter) for parameter in parameters):
        gc.collect()


def _swap(name: str, parameter: nn.Parameter, value: torch.Tensor) -> None:
    """Put ``value`` inside the same Parameter object; class, attributes and requires_grad stay."""
    if type(parameter) is nn.Parameter:
        incoming = nn.Parameter(value.detach(), requires_grad=parameter.requires_grad)
    else:
        incoming = torch.Tensor._make_subclass(type(parameter), value.detach(), parameter.requires_grad)
    vars(incoming).update(vars(parameter))
    try:
        swap_tensors(parameter, incoming)  # type: ignore[no-untyped-call]
    except RuntimeError as error:
        raise RunError(
            f"Parameter {name!r} cannot change its storage because something still refers to it: {error}. Drop "
            f"losses, outputs and weak references kept from earlier forward passes."
        ) from error
