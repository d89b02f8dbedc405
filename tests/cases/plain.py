"""What an ordinary PyTorch loop in one process makes of the same samples. Varuna gives the sample ids only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import varuna
from tests.cases.jobs import Training


@dataclass(frozen=True, kw_only=True)
class Plain:
    """Final parameters and buffers, and one number per step (the norm is the one before clipping)."""

    state: dict[str, Tensor]
    losses: list[float]
    weights: list[float]
    grad_norms: list[float]


def ids_of(training: Training, step_index: int) -> list[int]:
    """Samples of a step's global batch."""
    return varuna.sample_ids(
        step_index, len(training.dataset), training.batch_size, training.options.get("seed", 3)
    )


def train(
    training: Training,
    loss_of: Callable[[nn.Module, Any], tuple[Tensor, float | Tensor]],
    *,
    micro_batch_size: int | None = None,
    num_steps: int | None = None,
) -> Plain:
    """The plain loop; ``loss_of(model, batch)`` gives the loss summed and its weight.

    Without ``micro_batch_size`` every step is ONE forward pass of the whole global batch.
    """
    model = training.make_model().train()
    optimizer = training.optimizer(model)
    scheduler = None if training.scheduler is None else training.scheduler(optimizer)
    clip = training.options.get("clip_grad_norm")
    collate = training.options.get("collate_fn") or torch.utils.data.default_collate
    losses, weights, norms = [], [], []
    for step_index in range(training.num_steps if num_steps is None else num_steps):
        ids = ids_of(training, step_index)
        size = micro_batch_size or len(ids)
        total, weight = 0.0, 0.0
        for start in range(0, len(ids), size):
            batch = collate([training.dataset[index] for index in ids[start : start + size]])
            part, part_weight = loss_of(model, batch)
            part.backward()
            total += part.item()
            weight += float(part_weight)
        gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
        for gradient in gradients:
            gradient.div_(weight)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), clip or float("inf")).item())
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        optimizer.zero_grad()
        losses.append(total / weight)
        weights.append(weight)
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Plain(state=state, losses=losses, weights=weights, grad_norms=norms)


def mean_over_samples(model: nn.Module, batch: Any) -> tuple[Tensor, float]:
    """For models that return the mean: sum and number of samples."""
    num_samples = len(next(iter(batch.values())))
    output = model(**batch)
    return output * num_samples, num_samples


def stated(model: nn.Module, batch: Any) -> tuple[Tensor, float | Tensor]:
    """For models that return ``varuna.Loss``."""
    output = model(**batch)
    return output.sum, output.weight


def difference(ours: dict[str, Tensor], theirs: dict[str, Tensor]) -> float:
    """Largest difference of any tensor, relative to that tensor's largest value."""
    assert list(ours) == list(theirs)
    worst = 0.0
    for name, other in theirs.items():
        mine = ours[name]
        assert (mine.shape, mine.dtype) == (other.shape, other.dtype), name
        scale = other.double().abs().max().item() or 1.0
        worst = max(worst, (mine.double() - other.double()).abs().max().item() / scale)
    return worst


def gradients(training: Training, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """After one step of SGD with learning rate 1: what was subtracted from each parameter."""
    before = training.make_model().state_dict()
    return {name: before[name] - state[name] for name in before if before[name].is_floating_point()}


def assert_equal(ours: Sequence[float], theirs: Sequence[float], bound: float = 1e-12) -> None:
    """Numbers of steps, within a relative bound."""
    assert len(ours) == len(theirs)
    for mine, other in zip(ours, theirs, strict=True):
        assert abs(mine - other) <= bound * max(1.0, abs(other)), (ours, theirs)
