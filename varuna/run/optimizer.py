"""What an optimizer must be like to work where a worker holds only some of the parameters.

The optimizer is the user's own object over all parameters. Those not held here are on the meta device with
gradient None, so ``step`` passes over them; everything that computes each parameter's update from that
parameter's own gradient and state works: all of ``torch.optim`` but LBFGS and SparseAdam. What cannot be found
out by looking: an optimizer that mixes numbers of several parameters (a global norm inside ``step``,
D-Adaptation) sees only those held here.

Parameters of the model that no group has are never updated, as in a plain loop.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer, SparseAdam

from varuna.errors import OptimizerError

_ALTERNATIVES = "Use one that updates each parameter from its own gradient, e.g. AdamW, SGD, Adafactor or Lion."


def check_optimizer(optimizer: object, model: nn.Module) -> None:
    """Raise ``OptimizerError`` with the reason and what to do if the optimizer cannot be split over workers."""
    if not isinstance(optimizer, Optimizer):
        raise OptimizerError(
            f"optimizer is a {type(optimizer).__name__}, not a torch.optim.Optimizer. Pass the optimizer "
            f"object itself, constructed over model.parameters()."
        )
    name = type(optimizer).__name__
    if isinstance(optimizer, LBFGS) or _needs_closure(optimizer):
        raise OptimizerError(
            f"{name}.step needs a closure that evaluates the whole model again, with all gradients in one "
            f"place. Here a worker holds a part of the model. {_ALTERNATIVES}"
        )
    if isinstance(optimizer, SparseAdam):
        raise OptimizerError(
            f"{name} needs sparse gradients, which cannot be summed over workers. Use Adam or AdamW and "
            f"sparse=False in torch.nn.Embedding."
        )
    if not any(group["params"] for group in optimizer.param_groups):
        raise OptimizerError(f"The optimizer ({name}) has no parameters. Construct it over model.parameters().")
    _check_parameters(optimizer, model)


def learning_rates(optimizer: Optimizer) -> tuple[float, ...]:
    """The learning rate of each param group, now."""
    return tuple(float(group["lr"]) for group in optimizer.param_groups if "lr" in group)


def _needs_closure(optimizer: Optimizer) -> bool:
    try:  # of the class: schedulers wrap the instance's method, and the wrapper shows ``self`` again
        parameters = list(inspect.signature(type(optimizer).step).parameters.values())[1:]
    except (TypeError, ValueError):  # built in C, say: nothing to read
        return False
    ordinary = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
    return any(p.kind in ordinary and p.default is inspect.Parameter.empty for p in parameters)


def _check_parameters(optimizer: Optimizer, model: nn.Module) -> None:
    in_model = {id(parameter) for parameter in model.parameters()}
    seen: set[int] = set()
    for group_index, group in enumerate(optimizer.param_groups):
        for position, parameter in enumerate(group["params"]):
            what = (
                f"Parameter {position} (shape {list(parameter.shape)}) of the optimizer's group {group_index}"
            )
            if id(parameter) not in in_model:
                raise OptimizerError(
                    f"{what} is not a parameter of the model. Construct the optimizer after everything that "
                    f"replaces parameters (model.to_empty, weight tying, a copy of the model), from "
                    f"model.parameters()."
                )
            if id(parameter) in seen:
                raise OptimizerError(f"{what} is there twice. List each parameter once.")
            seen.add(id(parameter))


# --- state made in the constructor ----------------------------------------------------------


def has_state_from_constructor(optimizer: Optimizer) -> bool:
    """True if some parameter already has state, as Adagrad's have before the first step."""
    return any(optimizer.state.get(p) for group in optimizer.param_groups for p in group["params"])


def group_of(optimizer: Optimizer, parameter: nn.Parameter) -> Mapping[str, Any] | None:
    """The param group that has this parameter, or None."""
    return next(
        (group for group in optimizer.param_groups if any(p is parameter for p in group["params"])), None
    )


def fresh_state(optimizer: Optimizer, parameter: nn.Parameter, group: Mapping[str, Any]) -> dict[str, Any]:
    """The state that the optimizer's constructor makes for a parameter under its group's options; often empty.

    Raises:
        OptimizerError: the class cannot be constructed again from its group's options.
    """
    accepted = inspect.signature(type(optimizer).__init__).parameters
    options = {key: value for key, value in group.items() if key != "params" and key in accepted}
    try:
        twin = type(optimizer)([parameter], **options)
    except (TypeError, ValueError) as error:
        raise OptimizerError(
            f"{type(optimizer).__name__} makes state in its constructor and cannot be constructed again from "
            f"its group's options {sorted(options)} to make it for parameters that arrive later: {error}. Make "
            f"the state in step(), at a parameter's first gradient, as torch.optim.AdamW does."
        ) from error
    return dict(twin.state.get(parameter, {}))
