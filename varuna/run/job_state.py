"""What a job is besides its sections, as JSON for newcomers: steps done, loss scale, learning rates, calls."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.errors import OptimizerError
from varuna.run.call_log import Call
from varuna.run.precision import LossScaler

_ITEMS = "items of a mapping"
"""Marks a mapping whose keys are no strings, such as the milestones of ``MultiStepLR``."""


class JobState(msgspec.Struct, frozen=True, kw_only=True):
    """The same on every member after every step.

    Attributes:
        step_index: the next step.
        scaler: ``LossScaler.state_dict()``.
        lr_scheduler: its ``state_dict()`` as plain JSON, empty without one.
        param_groups: options of the optimizer's groups, learning rates among them.
        calls: made so far; the last one may be under way.
    """

    step_index: int
    scaler: dict[str, float]
    lr_scheduler: dict[str, Any]
    param_groups: list[dict[str, Any]]
    calls: list[Call]


def job_state(
    step_index: int,
    scaler: LossScaler,
    optimizer: Optimizer,
    lr_scheduler: LRScheduler | None,
    calls: Sequence[Call],
) -> JobState:
    """The state as it is now."""
    return JobState(
        step_index=step_index,
        scaler=dict(scaler.state_dict()),
        lr_scheduler={} if lr_scheduler is None else _plain(lr_scheduler.state_dict()),
        param_groups=[
            {key: _plain(value) for key, value in group.items() if key != "params"}
            for group in optimizer.param_groups
        ],
        calls=list(calls),
    )


def encode_job_state(state: JobState) -> bytes:
    """JSON of the state.

    Raises:
        OptimizerError: it holds something that is not JSON.
    """
    try:
        return msgspec.json.encode(state)
    except TypeError as error:
        raise OptimizerError(
            f"The state of the optimizer's groups or of the learning-rate scheduler cannot be handed to "
            f"another worker: {error}. It must be numbers, strings, lists and dicts."
        ) from error


def decode_job_state(data: bytes) -> JobState:
    """What ``encode_job_state`` wrote; ``msgspec.ValidationError`` for anything else."""
    return msgspec.json.decode(data, type=JobState)


def load_schedule(lr_scheduler: LRScheduler, state: Mapping[str, Any]) -> None:
    """Give a scheduler, made by the same script, the state that another worker's has."""
    lr_scheduler.load_state_dict(_like(lr_scheduler.state_dict(), state))


def load_options(optimizer: Optimizer, param_groups: Sequence[Mapping[str, Any]]) -> None:
    """Give an optimizer's groups the options that another worker's have.

    Raises:
        OptimizerError: this worker's script made other groups.
    """
    if len(param_groups) != len(optimizer.param_groups):
        raise OptimizerError(
            f"The optimizer has {len(optimizer.param_groups)} parameter groups here and {len(param_groups)} on "
            f"the other workers. Every worker must run the same script."
        )
    for group, options in zip(optimizer.param_groups, param_groups, strict=True):
        for key, value in options.items():
            if isinstance(group.get(key), Tensor):
                group[key].fill_(value)
            else:
                group[key] = _like(group.get(key), value)


def _plain(value: Any) -> Any:
    """The same in JSON's types."""
    if isinstance(value, Mapping):
        if all(isinstance(key, str) for key in value):
            return {key: _plain(item) for key, item in value.items()}
        return {_ITEMS: [[key, _plain(item)] for key, item in value.items()]}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    if isinstance(value, Tensor) and value.numel() == 1:
        return value.item()
    return value


def _like(example: Any, value: Any) -> Any:
    """``value``, which came as JSON, in the types of ``example``."""
    if isinstance(value, Mapping):
        items = dict(value[_ITEMS]) if set(value) == {_ITEMS} else dict(value)
        if not isinstance(example, Mapping):
            return items
        found = {key: _like(example.get(key), item) for key, item in items.items()}
        return found if type(example) is dict else type(example)(found)  # type: ignore[call-arg]
    if isinstance(value, list):
        examples = list(example) if isinstance(example, (list, tuple)) else []
        examples += [None] * (len(value) - len(examples))
        found_items = [_like(one, item) for one, item in zip(examples, value, strict=False)]
        return tuple(found_items) if isinstance(example, tuple) else found_items
    return value
