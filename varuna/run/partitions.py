"""The partitions of one model: for training, for evaluation, and for every shape of input that comes up.

The first one is the reference: all others are cut at the same places, so that a section always holds the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from varuna.errors import CaptureError
from varuna.partition import InputSignature, Partition, example_batch, partition
from varuna.run.precision import AutocastSpec
from varuna.run.switches import Flags

EXAMPLE_NUM_SAMPLES = 2
"""Samples in the batch that a capture runs on; 1 is avoided because sizes of 1 are treated specially."""


@dataclass(frozen=True, kw_only=True)
class PartitionOptions:
    """How the model is captured and cut.

    Attributes:
        autocast: the run's own.
        cut_points: module names, or None for marks in forward or automatic ones.
        opaque: names of modules not to look into.
        loss_fn: ``loss_fn(output, *rest_of_batch)`` for models that return no loss.
        cache_dir: where captures are kept between starts, or None.
    """

    autocast: AutocastSpec
    cut_points: Sequence[str] | None = None
    opaque: Sequence[str] = ()
    loss_fn: Callable[..., Any] | None = None
    cache_dir: Path | None = None


class Partitions:
    """Captures on demand, once per (input signature, training or evaluation), through the capture cache.

    Args:
        model: the user's module; an attribute, too.
        signature: of the job's first batch.
        options: how it is cut.
        device: where sections run.
    """

    def __init__(
        self, model: nn.Module, signature: InputSignature, options: PartitionOptions, device: torch.device
    ) -> None:
        self.signature = signature
        self._device = device
        self.model = model
        self._options = options
        self._parameters = tuple(model.parameters())
        self._modules = tuple(model.modules())
        self._known: dict[_Key, Partition] = {}
        self._reference: Partition | None = None

    @property
    def reference(self) -> Partition:
        """The training partition of the job's first batch, as the model was when the job started."""
        if self._reference is None:
            self._reference = self.get(None, EXAMPLE_NUM_SAMPLES, training=True)
        return self._reference

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Parameters that no section uses, in the model's order."""
        used = {name for section in self.reference.sections for name in section.parameters}
        return tuple(name for name, _ in self.model.named_parameters() if name not in used)

    def flags(self) -> Flags:
        """Which parameters are trained and which modules are in train mode, now."""
        is_training = self._modules[0].training
        return Flags(
            trainable=tuple(parameter.requires_grad for parameter in self._parameters),
            modes=tuple(module.training or not is_training for module in self._modules),
        )

    def get(self, signature: InputSignature | None, num_samples: int, *, training: bool) -> Partition:
        """The partition for a signature; None stands for the job's first one.

        It is of the model as it is now: parameters that were frozen or unfrozen, and modules that were put into
        eval or train mode, since the last capture make a new one. ``num_samples`` matters only for models whose
        capture is bound to one number of samples.

        Raises:
            CaptureError: if the model cannot be captured for this shape.
            CutPointError: if it cannot be cut where the reference is cut.
        """
        key = _Key(signature=signature or self.signature, training=training, flags=self.flags())
        found = self._known.get(key)
        if found is None:
            found = self._known[key] = self._capture(key, EXAMPLE_NUM_SAMPLES)
        if found.dynamic_batch or found.example_batch_size == num_samples:
            return found
        exact = replace(key, num_samples=num_samples)
        if exact not in self._known:
            self._known[exact] = self._capture(exact, num_samples)
        return self._known[exact]

    def _capture(self, key: _Key, num_samples: int) -> Partition:
        options = self._options
        like = self.reference if self._known else None
        made = partition(
            self.model,
            example_batch(key.signature, num_samples, device="cpu"),
            training=key.training,
            autocast=options.autocast,
            cut_points=options.cut_points,
            opaque=options.opaque,
            loss_fn=options.loss_fn,
            cache_dir=options.cache_dir,
            like=like,
            device=self._device,
        )
        if like is not None:
            _check_buffers(made, like)
        return made


@dataclass(frozen=True, kw_only=True)
class _Key:
    """What a capture depends on that may change while the job runs; ``num_samples`` 0 is any number."""

    signature: InputSignature
    training: bool
    flags: Flags
    num_samples: int = 0


def _check_buffers(made: Partition, like: Partition) -> None:
    """Pipelines join only the buffers that forward changed when the job started."""
    for section, before in zip(made.sections, like.sections, strict=True):
        new = section.mutated_buffers.keys() - before.mutated_buffers.keys()
        if new:
            raise CaptureError(
                f"Forward now changes {', '.join(sorted(new))}, which it did not when the job started: a "
                f"module was put from eval into train mode. Make a new job after such a change."
            )
