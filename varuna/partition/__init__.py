"""User model to sections: capture, cut, split.

::

    partition(model, batch)  ->  Partition: sections that run one after another, digest, loss
"""

from __future__ import annotations

from varuna.partition.capture import capture
from varuna.partition.cutpoint import CutPoint
from varuna.partition.graph import Autocast, CapturedGraph
from varuna.partition.loss import Loss, LossParts
from varuna.partition.pipeline import partition
from varuna.partition.section import BufferRule, Partition, Section, ValueSpec
from varuna.partition.signature import (
    FlatBatch,
    InputSignature,
    example_batch,
    flatten_batch,
    signature_of,
)
from varuna.partition.ties import canonical_names, tied_groups

__all__ = [
    "Autocast",
    "BufferRule",
    "CapturedGraph",
    "CutPoint",
    "FlatBatch",
    "InputSignature",
    "Loss",
    "LossParts",
    "Partition",
    "Section",
    "ValueSpec",
    "canonical_names",
    "capture",
    "example_batch",
    "flatten_batch",
    "partition",
    "signature_of",
    "tied_groups",
]
