"""What a batch looks like apart from its number of samples.

``InputSignature`` is hashable; two batches with equal signatures can be run by the same captured graph.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from varuna.errors import DataError
from varuna.partition.batch import (
    Constant,
    FlatBatch,
    Node,
    call_arguments,
    check_call,
    flatten_batch,
    node_from_json,
    num_samples_of,
    rebuild,
)

__all__ = [
    "Constant",
    "FlatBatch",
    "InputSignature",
    "Node",
    "TensorSpec",
    "call_arguments",
    "check_call",
    "example_batch",
    "flatten_batch",
    "num_samples_of",
    "rebuild",
    "signature_of",
    "signature_of_flat",
]


@dataclass(frozen=True, kw_only=True)
class TensorSpec:
    """One tensor of a batch.

    Attributes:
        key: its path in the batch, ``"labels.x"``.
        dtype: ``"int64"``.
        shape: sizes without the batch dimension (dimension 0) if it has one, otherwise all sizes.
        has_batch_dim: whether dimension 0 counts samples.
    """

    key: str
    dtype: str
    shape: tuple[int, ...]
    has_batch_dim: bool

    @property
    def torch_dtype(self) -> torch.dtype:
        """``dtype`` as torch knows it."""
        found = getattr(torch, self.dtype, None)
        if not isinstance(found, torch.dtype):
            raise DataError(f"Input {self.key!r} has dtype {self.dtype!r}, which torch does not know.")
        return found

    def full_shape(self, num_samples: int) -> tuple[int, ...]:
        """All sizes for a batch of ``num_samples``."""
        return (num_samples, *self.shape) if self.has_batch_dim else self.shape


@dataclass(frozen=True, kw_only=True)
class InputSignature:
    """A batch without its values and its number of samples; hashable, and JSON by ``to_json``."""

    tensors: tuple[TensorSpec, ...]
    tree: Node

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of the tensors, in order."""
        return tuple(spec.key for spec in self.tensors)

    @property
    def digest(self) -> str:
        """16 hex digits that are the same in every process."""
        return hashlib.sha256(self.to_json().encode()).hexdigest()[:16]

    def tensor(self, key: str) -> TensorSpec:
        """The tensor called ``key``. Raises DataError if there is none."""
        for spec in self.tensors:
            if spec.key == key:
                return spec
        raise DataError(f"The batch has no tensor {key!r}; it has {', '.join(self.keys)}.")

    def to_json(self) -> str:
        """Text with sorted keys; equal signatures give equal text."""
        return json.dumps(dataclasses.asdict(self), sort_keys=True)

    @staticmethod
    def from_json(text: str) -> InputSignature:
        """What ``to_json`` wrote."""
        raw = json.loads(text)
        tensors = tuple(
            TensorSpec(
                key=item["key"],
                dtype=item["dtype"],
                shape=tuple(item["shape"]),
                has_batch_dim=item["has_batch_dim"],
            )
            for item in raw["tensors"]
        )
        return InputSignature(tensors=tensors, tree=node_from_json(raw["tree"]))


def signature_of(batch: object, batch_dim_size: int | None = None) -> InputSignature:
    """The signature of a batch.

    Args:
        batch: as the collate function returned it.
        batch_dim_size: number of samples, if known: tensors whose dimension 0 has another size have no batch
            dimension. Without it, the size of dimension 0 that most tensors have (the first one's on a tie).
    """
    flat = flatten_batch(batch)
    return signature_of_flat(flat, num_samples_of(flat) if batch_dim_size is None else batch_dim_size)


def signature_of_flat(flat: FlatBatch, num_samples: int) -> InputSignature:
    """The signature of a flattened batch of ``num_samples`` samples."""
    return InputSignature(
        tensors=tuple(_tensor_spec(key, tensor, num_samples) for key, tensor in flat.tensors.items()),
        tree=flat.tree,
    )


def example_batch(signature: InputSignature, num_samples: int, device: str | torch.device = "meta") -> Any:
    """A batch of zeros with this signature, so that a worker that reads no data can capture."""
    tensors = {
        spec.key: torch.zeros(spec.full_shape(num_samples), dtype=spec.torch_dtype, device=device)
        for spec in signature.tensors
    }
    return rebuild(signature.tree, tensors)


def _tensor_spec(key: str, tensor: Tensor, size: int) -> TensorSpec:
    has_batch_dim = tensor.dim() > 0 and tensor.shape[0] == size
    return TensorSpec(
        key=key,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape[1:] if has_batch_dim else tensor.shape),
        has_batch_dim=has_batch_dim,
    )
