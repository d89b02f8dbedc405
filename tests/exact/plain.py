"""The reference: an ordinary PyTorch training loop in one process. Nothing of Varuna is imported here.

One rule stands for all: the gradient of a step is the sum over its samples (or stated weights) divided once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-3
CLIP_GRAD_NORM = 0.5


@dataclass(frozen=True, kw_only=True)
class Trained:
    """What a run ends with.

    Attributes:
        state: parameters and buffers under the model's own names, as ``model.state_dict()`` gives them.
        losses, grad_norms: one number per step; the norm is the one before clipping.
    """

    state: dict[str, Tensor]
    losses: list[float]
    grad_norms: list[float]


def make_optimizer(model: nn.Module) -> torch.optim.AdamW:
    """AdamW with two param groups: matrices decay, the rest does not."""
    parameters = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in parameters if p.dim() > 1], "weight_decay": 0.1},
            {"params": [p for p in parameters if p.dim() <= 1], "weight_decay": 0.0, "lr": LEARNING_RATE / 2},
        ],
        lr=LEARNING_RATE,
    )


def make_scheduler(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.LambdaLR:
    """Warm-up over three steps, then decay: a different rate in every step."""
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min((step + 1) / 3, 3 / (step + 1)))


def train(
    model: nn.Module,
    dataset: Any,
    ids_of_step: Sequence[Sequence[int]],
    micro_batch_size: int,
    *,
    collate: Callable[[list[Any]], Any] | None = None,
    loss_fn: Callable[..., Tensor] | None = None,
) -> Trained:
    """Trains one step per list of sample ids, in micro-batches of which the last may be short."""
    optimizer = make_optimizer(model)
    scheduler = make_scheduler(optimizer)
    collate = collate or torch.utils.data.default_collate
    losses, grad_norms = [], []
    for ids in ids_of_step:
        loss_sum, weight_sum = 0.0, 0.0
        for start in range(0, len(ids), micro_batch_size):
            part = ids[start : start + micro_batch_size]
            batch = collate([dataset[index] for index in part])
            output = loss_fn(model(batch[0]), *batch[1:]) if loss_fn else _call(model, batch)
            loss, weight = _sum_and_weight(output, len(part))
            loss.backward()
            loss_sum += loss.item()
            weight_sum += weight
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad.div_(weight_sum)
        norm = torch.nn.utils.clip_grad_norm_(model.parameters(), CLIP_GRAD_NORM)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss_sum / weight_sum)
        grad_norms.append(norm.item())
    state = {name: tensor.detach().clone() for name, tensor in model.state_dict().items()}
    return Trained(state=state, losses=losses, grad_norms=grad_norms)


def _call(model: nn.Module, batch: Any) -> Any:
    if isinstance(batch, dict):
        return model(**batch)
    if isinstance(batch, tuple | list):
        return model(*batch)
    return model(batch)


def _sum_and_weight(output: Any, num_samples: int) -> tuple[Tensor, float]:
    """The loss summed over the micro-batch, and how much that counts."""
    if isinstance(output, tuple) and hasattr(output, "weight"):
        return output.sum, float(output.weight)
    if isinstance(output, dict):
        output = output["loss"]
    elif not isinstance(output, Tensor):
        output = output.loss
    return output * num_samples, float(num_samples)
