"""Whether every micro-batch looks like the first: same keys and dtypes, and as many rows as samples.

Sizes other than that of the batch dimension may change (sequence lengths); what that costs is for the capture
to say.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

from varuna.errors import DataError
from varuna.partition.signature import FlatBatch


@dataclass(frozen=True, kw_only=True)
class TensorLayout:
    """What stays the same about one tensor of a batch: dtype, number of dimensions, rows per sample or not."""

    dtype: str
    num_dims: int
    has_batch_dim: bool


@dataclass(frozen=True, kw_only=True)
class BatchLayout:
    """What stays the same about a batch, by key."""

    tensors: Mapping[str, TensorLayout]


def layout_of(
    flat: FlatBatch, num_samples: int, fewer: FlatBatch | None = None, num_fewer: int = 0
) -> BatchLayout:
    """The layout that all later micro-batches must have.

    Args:
        flat: a batch of ``num_samples``.
        num_samples: samples in it.
        fewer: the same batch collated from only its first ``num_fewer`` samples. With it, a tensor whose
            dimension 0 follows the number of samples is told from one whose size is the same by chance.
        num_fewer: samples in ``fewer``.

    Raises:
        DataError: a dimension 0 that follows the number of samples without being equal to it, or no tensor
            that has one row per sample.
    """
    tensors: dict[str, TensorLayout] = {}
    for key, tensor in flat.tensors.items():
        rows = tensor.shape[0] if tensor.dim() else None
        other = fewer.tensors.get(key) if fewer is not None else None
        if other is not None and other.dim() == tensor.dim() and rows is not None:
            has_batch_dim = other.shape[0] != rows
        else:
            has_batch_dim = rows == num_samples
        if has_batch_dim and rows != num_samples:
            raise _rows_error(key, tensor, num_samples)
        if has_batch_dim and other is not None and other.shape[0] != num_fewer:
            raise _rows_error(key, other, num_fewer)
        tensors[key] = TensorLayout(dtype=_dtype(tensor), num_dims=tensor.dim(), has_batch_dim=has_batch_dim)
    if not any(layout.has_batch_dim for layout in tensors.values()):
        shapes = ", ".join(f"{key} {tuple(tensor.shape)}" for key, tensor in flat.tensors.items())
        raise DataError(
            f"The collate function made no tensor with one row per sample: from {num_samples} samples it made "
            f"{shapes}. Dimension 0 must count the samples."
        )
    return BatchLayout(tensors=tensors)


def check_batch(layout: BatchLayout, flat: FlatBatch, num_samples: int, where: object) -> None:
    """Compare a micro-batch with the layout of the first. Raises DataError that says where and what differs."""
    if flat.tensors.keys() != layout.tensors.keys():
        missing = sorted(layout.tensors.keys() - flat.tensors.keys())
        added = sorted(flat.tensors.keys() - layout.tensors.keys())
        raise DataError(
            f"The collate function made other tensors for {where} than for the first micro-batch: "
            f"missing {missing}, added {added}. It must always make the same ones."
        )
    for key, tensor in flat.tensors.items():
        expected = layout.tensors[key]
        if _dtype(tensor) != expected.dtype or tensor.dim() != expected.num_dims:
            raise DataError(
                f"Tensor {key!r} of {where} has dtype {_dtype(tensor)} and {tensor.dim()} dimensions; in the "
                f"first micro-batch it had {expected.dtype} and {expected.num_dims}. The collate function must "
                "always make the same."
            )
        if expected.has_batch_dim and tensor.shape[0] != num_samples:
            raise _rows_error(key, tensor, num_samples, where)


def _rows_error(key: str, tensor: Tensor, num_samples: int, where: object = "") -> DataError:
    place = f" of {where}" if where else ""
    return DataError(
        f"Tensor {key!r}{place} has shape {tuple(tensor.shape)}, {tensor.shape[0]} rows for {num_samples} "
        "samples. The collate function must keep one row per sample in dimension 0."
    )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")
