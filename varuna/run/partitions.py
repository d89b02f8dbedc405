"""The partitions of one model: for training, for evaluation, and for every shape of input that comes up.

The first one is the reference: all others are cut at the same places, so that a section always holds the same
parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import nn

from varuna.partition import InputSignature, Partition, example_batch, partition
from varuna.run.precision import AutocastSpec

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
        model: the user's module.
        signature: of the job's first batch.
        options: how it is cut.
        device: where sections run.
    """

    def __init__(
        self, model: nn.Module, signature: InputSignature, options: PartitionOptions, device: torch.device
    ) -> None:
        self.signature = signature
        self._device = device
        self._model = model
        self._options = options
        self._known: dict[tuple[InputSignature, bool, int], Partition] = {}

    @property
    def reference(self) -> Partition:
        """The training partition of the job's first batch."""
        return self.get(None, EXAMPLE_NUM_SAMPLES, training=True)

    @property
    def unused_parameters(self) -> tuple[str, ...]:
        """Parameters that no section uses, in the model's order."""
        used = {name for section in self.reference.sections for name in section.parameters}
        return tuple(name for name, _ in self._model.named_parameters() if name not in used)

    def get(self, signature: InputSignature | None, num_samples: int, *, training: bool) -> Partition:
        """The partition for a signature; None stands for the job's first one.

        ``num_samples`` matters only for models whose capture is bound to one number of samples.

        Raises:
            CaptureError: if the model cannot be captured for this shape.
            CutPointError: if it cannot be cut where the reference is cut.
        """
        signature = signature or self.signature
        found = self._known.get((signature, training, 0))
        if found is not None and (found.dynamic_batch or found.example_batch_size == num_samples):
            return found
        if found is None:
            found = self._capture(signature, EXAMPLE_NUM_SAMPLES, training)
            self._known[signature, training, 0] = found
            return self.get(signature, num_samples, training=training)
        if (signature, training, num_samples) not in self._known:
            self._known[signature, training, num_samples] = self._capture(signature, num_samples, training)
        return self._known[signature, training, num_samples]

    def _capture(self, signature: InputSignature, num_samples: int, training: bool) -> Partition:
        options = self._options
        is_first = not self._known
        return partition(
            self._model,
            example_batch(signature, num_samples, device="cpu"),
            training=training,
            autocast=options.autocast,
            cut_points=options.cut_points,
            opaque=options.opaque,
            loss_fn=options.loss_fn,
            cache_dir=options.cache_dir,
            like=None if is_first else self.reference,
            device=self._device,
        )
