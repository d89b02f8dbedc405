"""What the user asked for that every generation needs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from varuna.run.fetch import CollateFn, MapDataset
from varuna.run.precision import AutocastSpec
from varuna.run.spans import SpanRecorder

LossWeight = Callable[[Any], float | torch.Tensor]
"""The user's ``loss_weight``: a collated batch to the weight of its loss."""

POINTS = (
    "start",
    "join",
    "step",
    "forward",
    "final backward",
    "reduce",
    "commit",
    "committed",
    "form",
    "transfer",
    "gather",
    "save",
    "manifest",
)
"""Where a worker can be: it starts, a newcomer is ready for a place, a step begins, a micro-batch's forward
begins, the last backward of the step begins, gradients are all there, they are reduced and the commit begins,
the commit has returned, a generation is being formed, a section is about to change hands, all have come to
gather the whole state on worker 0, a part of a checkpoint is about to be written (in a thread), all parts are
there and make it a checkpoint (likewise)."""


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
        at: called at named points (``POINTS``), where tests let things go wrong.
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
