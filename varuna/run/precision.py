"""Number formats of a run: what forward computes in, and the fp16 loss scale.

Weights and optimizer state always keep the dtype the model has; ``bf16`` and ``fp16`` are autocast.
``fp64`` means that the model itself is made float64 (``convert_model``), which is meant for tests.

The loss scale. Stages back-propagate the sum over samples times loss scale over the power of two nearest to
the batch size, so fp16 gradients are in the range they have in a plain loop, and 2**16 is the usual first
scale. Every worker holds the same scaler and feeds it the same committed overflow bit, so the scale stays equal
everywhere with no message.
"""

from __future__ import annotations

import contextlib
import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace

import torch
from torch import nn

from varuna.errors import ConfigError, NonFiniteLoss


class Precision(enum.Enum):
    """What forward and backward compute in; the value is what users write."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"
    FP64 = "fp64"

    @classmethod
    def parse(cls, text: str | Precision) -> Precision:
        """The precision of that name; ``ConfigError`` with the choices otherwise."""
        if isinstance(text, Precision):
            return text
        try:
            return cls(text)
        except ValueError:
            choices = ", ".join(repr(choice.value) for choice in cls)
            raise ConfigError(f"precision={text!r} is not known. Choose one of {choices}.") from None

    @property
    def autocast_dtype(self) -> torch.dtype | None:
        """The dtype autocast runs in, or None where there is no autocast."""
        return {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}.get(self)

    @property
    def scales_loss(self) -> bool:
        """True if gradients need a loss scale."""
        return self is Precision.FP16


@dataclass(frozen=True, kw_only=True)
class AutocastSpec:
    """Autocast as a value: device type (``"cpu"``, ``"cuda"``) and dtype; dtype None is no autocast."""

    device_type: str
    dtype: torch.dtype | None = None

    @classmethod
    def of(cls, precision: Precision, device: torch.device) -> AutocastSpec:
        """What a precision means on a device."""
        return cls(device_type=device.type, dtype=precision.autocast_dtype)

    def context(self) -> contextlib.AbstractContextManager[object]:
        """A fresh context to run one forward in."""
        if self.dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.device_type, dtype=self.dtype)


def convert_model(model: nn.Module, precision: Precision) -> None:
    """For ``fp64`` make the model's floating parameters and buffers float64 in place; else do nothing.

    Parameters keep their identity, so an optimizer that already refers to them stays valid. Call it before
    the optimizer's first step.
    """
    if precision is Precision.FP64:
        model.double()


@dataclass(frozen=True, kw_only=True)
class LossScaler:
    """Dynamic loss scale as a value; ``update`` returns the next one.

    Attributes:
        scale: what the loss is multiplied by before backward.
        good_steps: updates without overflow since the scale last changed.
        growth_interval: good steps after which the scale doubles.
        minimum: scale below which an overflow is no longer a matter of scale.
        enabled: False for every precision but fp16; then ``scale`` is 1 and never changes.
    """

    scale: float = 1.0
    good_steps: int = 0
    growth_interval: int = 2000
    minimum: float = 2.0**-12
    enabled: bool = True

    @classmethod
    def initial(cls, precision: Precision) -> LossScaler:
        """2**16 for fp16; disabled otherwise."""
        return cls(scale=2.0**16) if precision.scales_loss else cls(enabled=False)

    def update(self, overflow: bool) -> LossScaler:
        """The scaler after a step: halved on overflow, doubled after ``growth_interval`` good steps.

        Raises:
            NonFiniteLoss: an overflow at the minimum scale.
        """
        if not self.enabled:
            return self
        if overflow:
            if self.scale / 2 < self.minimum:
                raise NonFiniteLoss(
                    f"Gradients overflow in fp16 even at loss scale {self.scale}, the smallest tried. The "
                    f"loss or its gradients are infinite or not-a-number whatever the scale. Use "
                    f'precision="bf16" or "fp32", or look for a division by zero, a logarithm of zero or too '
                    f"large a learning rate."
                )
            return replace(self, scale=self.scale / 2, good_steps=0)
        if self.good_steps + 1 >= self.growth_interval:
            return replace(self, scale=min(self.scale * 2, 2.0**126), good_steps=0)
        return replace(self, good_steps=self.good_steps + 1)

    def state_dict(self) -> dict[str, float | int]:
        """What a checkpoint keeps: scale and good steps."""
        return {"scale": self.scale, "good_steps": self.good_steps}

    def with_state(self, state: Mapping[str, float | int]) -> LossScaler:
        """This scaler with the scale and good steps of a ``state_dict``."""
        return replace(self, scale=float(state["scale"]), good_steps=int(state["good_steps"]))
