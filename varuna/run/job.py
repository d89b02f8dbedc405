"""What the user asked for that every generation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, get_args

import torch

from varuna.generations import Point
from varuna.run.fetch import CollateFn, MapDataset
from varuna.run.precision import AutocastSpec
from varuna.run.spans import SpanRecorder

LossWeight = Callable[[Any], float | torch.Tensor]
"""The user's ``loss_weight``: a collated batch to the weight of its loss."""

POINTS: tuple[str, ...] = get_args(Point)
"""The names of all points."""


def _nothing(_point: str) -> None:
    """Nobody wants to know."""


@dataclass(frozen=True, kw_only=True)
class JobSpec:
    """What the user asked for that every generation needs.

    Attributes:
        dataset, collate_fn, num_data_workers: how samples become batches.
        batch_size: samples in a global batch.
        seed: of data order and random numbers.
        autocast: precision of forward.
        loss_weight: weight of a batch's loss; None leaves it to what forward returns.
        token: secret of the job, for connections between workers.
        spans: told what this worker does when.
        at: called at named points (``Point``), where tests let things go wrong.
    """

    dataset: MapDataset
    collate_fn: CollateFn | None
    num_data_workers: int | None
    batch_size: int
    seed: int
    autocast: AutocastSpec
    loss_weight: LossWeight | None
    token: bytes
    spans: SpanRecorder = field(default_factory=SpanRecorder)
    at: Callable[[str], None] = _nothing
