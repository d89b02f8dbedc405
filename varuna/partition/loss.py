"""What ``forward`` may return as its loss, and how it becomes a sum and a weight.

Gradients are summed over all samples and divided once by the global weight; so every micro-batch gives a *sum*
and the *weight* that belongs to it. A scalar, or an output with ``.loss``, is taken as the mean over the
samples of the micro-batch; ``Loss(sum=..., weight=...)`` states both, e.g. the summed cross entropy and the
number of valid tokens.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from varuna.errors import LossError


class Loss(NamedTuple):
    """Returned by ``forward`` to state the loss exactly.

    Attributes:
        sum: loss summed over what is counted, a tensor with one element that requires gradients.
        weight: how much was counted (tokens, samples), a tensor with one element or a number.
    """

    sum: Tensor
    weight: Tensor | float


@dataclass(frozen=True, kw_only=True)
class OutputSpec:
    """How a captured graph's outputs are read.

    Attributes:
        form: ``"mean"``: one output, the mean over the samples. ``"sum"``: the summed loss, then its weight.
        weight: the weight if it is a number; None if it is the second output (or for ``"mean"``).
    """

    form: str
    weight: float | None = None

    @property
    def num_outputs(self) -> int:
        """Number of tensors that the graph returns."""
        return 2 if self.form == "sum" and self.weight is None else 1


@dataclass(frozen=True, kw_only=True)
class LossParts:
    """Loss of one micro-batch: ``sum`` is differentiable, 0-dimensional; ``weight`` goes into the divisor."""

    sum: Tensor
    weight: float


def loss_of(output_spec: OutputSpec, outputs: Sequence[Tensor], num_samples: int) -> LossParts:
    """Sum and weight of one micro-batch of ``num_samples`` samples from the graph's outputs.

    Raises:
        LossError: the loss has more than one element.
    """
    loss = _one_element(outputs[0], "loss")
    if output_spec.form == "mean":
        return LossParts(sum=loss * num_samples, weight=float(num_samples))
    if output_spec.weight is not None:
        return LossParts(sum=loss, weight=output_spec.weight)
    return LossParts(sum=loss, weight=float(_one_element(outputs[1], "weight").detach()))


def read_output(output: object) -> tuple[OutputSpec, tuple[Tensor, ...]]:
    """Finds the loss in what ``forward`` returned.

    Raises:
        LossError: it is no scalar, has no ``.loss``, and is no ``varuna.Loss``.
    """
    if isinstance(output, Loss):
        return _read_loss(output)
    loss = _find_loss(output)
    if loss is None:
        raise LossError(
            f"The model's forward returned {describe(output)}, in which no loss can be found. Return a scalar "
            f"tensor "
            f"(the mean over the batch), an output with .loss or a dict with 'loss', or "
            f"varuna.Loss(sum=..., weight=...)."
        )
    return OutputSpec(form="mean"), (_one_element(loss, "loss"),)


def describe(value: object, depth: int = 2) -> str:
    """Types and shapes of an output, for messages."""
    if isinstance(value, Tensor):
        return f"Tensor{shape_text(value)} of {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping) and depth:
        inside = ", ".join(f"{name}: {describe(item, depth - 1)}" for name, item in value.items())
        return f"{type(value).__name__}({inside})"
    if isinstance(value, (list, tuple)) and depth:
        return f"{type(value).__name__}({', '.join(describe(item, depth - 1) for item in value)})"
    if value is None:
        return "None"
    if isinstance(value, (int, float, torch.SymInt, torch.SymFloat)):
        return "a number"
    return f"an object of type {type(value).__name__}"


def shape_text(value: Tensor) -> str:
    """The shape as Python prints it; a size that follows the number of samples is ``batch``."""
    sizes = ["batch" if _is_symbolic(size) else str(int(size)) for size in value.shape]
    return f"({', '.join(sizes)}{',' if len(sizes) == 1 else ''})"


def _read_loss(output: Loss) -> tuple[OutputSpec, tuple[Tensor, ...]]:
    if not isinstance(output.sum, Tensor):
        raise LossError(f"varuna.Loss.sum must be a tensor, got {describe(output.sum)}.")
    loss = _one_element(output.sum, "sum")
    if isinstance(output.weight, Tensor):
        return OutputSpec(form="sum"), (loss, _one_element(output.weight, "weight"))
    if _is_symbolic(output.weight):
        weight = torch.full((), output.weight, dtype=torch.float64, device=loss.device)
        return OutputSpec(form="sum"), (loss, weight)
    if isinstance(output.weight, (int, float)):
        return OutputSpec(form="sum", weight=float(output.weight)), (loss,)
    raise LossError(f"varuna.Loss.weight must be a number or a tensor, got {describe(output.weight)}.")


def _is_symbolic(number: object) -> bool:
    """Whether it was computed from sizes while the model is captured, so that it is no plain number."""
    return isinstance(number, (torch.SymInt, torch.SymFloat))


def _find_loss(output: Any) -> Tensor | None:
    if isinstance(output, Tensor):
        return output
    found = output.get("loss") if isinstance(output, Mapping) else getattr(output, "loss", None)
    return found if isinstance(found, Tensor) else None


def _one_element(value: Tensor, what: str) -> Tensor:
    if value.numel() != 1:
        raise LossError(
            f"The {what} that the model's forward returned has shape {shape_text(value)}; it must have one "
            f"element. "
            f"Reduce it in forward, e.g. with .mean(), or return varuna.Loss(sum=..., weight=...)."
        )
    if value.is_complex():
        raise LossError(
            f"The {what} that the model's forward returned is complex ({describe(value)}), and gradients need "
            f"a real one. Take .abs() or .real of it."
        )
    return value if value.dim() == 0 else torch.reshape(value, ())
