"""``partition``: capture, cut and split in one call."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from varuna.errors import CaptureError
from varuna.partition.autocut import find_cut_points
from varuna.partition.capture import capture
from varuna.partition.flow import flow_of
from varuna.partition.graph import Autocast, CapturedGraph
from varuna.partition.key import capture_key
from varuna.partition.loss_fn import LossFunction, describe_loss_fn, forward_with_loss
from varuna.partition.recut import positions_like
from varuna.partition.section import Partition
from varuna.partition.sequential import is_chain, partition_chain
from varuna.partition.signature import InputSignature, flatten_batch, num_samples_of, signature_of
from varuna.partition.split import split
from varuna.partition.store import StoreError, load_graph, save_graph


def partition(
    model: nn.Module,
    batch: object,
    *,
    training: bool = True,
    autocast: Autocast | None = None,
    cut_points: Sequence[str] | None = None,
    loss_fn: LossFunction | None = None,
    opaque: Sequence[str] = (),
    cache_dir: Path | None = None,
    device: torch.device | str | None = None,
    like: Partition | None = None,
) -> Partition:
    """Divides a model into sections.

    Args:
        model: returns the loss, or an output that ``loss_fn`` takes. May be on the meta device.
        batch: one batch, or an ``InputSignature``.
        training: for train mode or eval mode.
        autocast: the run's precision.
        cut_points: names of modules to cut after; without them the model's ``CutPoint`` marks, else automatic.
        loss_fn: ``loss_fn(output, *rest_of_batch)``; see ``loss_fn.py``.
        opaque: paths of modules that are not to be captured.
        cache_dir: where captures are kept between runs.
        device: device the sections will run on; default is the device captured for.
        like: an earlier partition of the same model; every section of the new one holds the same parameters.

    Raises:
        CaptureError: the model cannot be captured.
        CutPointError: a cut point cannot be used, or ``like`` cannot be followed.
    """
    try:
        graph, from_cache = _captured(
            model,
            batch,
            training=training,
            autocast=autocast,
            opaque=opaque,
            loss_fn=loss_fn,
            cache_dir=cache_dir,
        )
    except CaptureError:
        if not is_chain(model):
            raise
        assert isinstance(model, nn.Sequential)
        signature = _signature(batch)
        return partition_chain(
            model, signature, training=training, cut_points=cut_points, loss_fn=loss_fn, like=like
        )
    made = partition_of(
        model, graph if device is None else graph.to_device(device), cut_points=cut_points, like=like
    )
    return dataclasses.replace(made, from_cache=from_cache)


def _signature(batch: object) -> InputSignature:
    return batch if isinstance(batch, InputSignature) else signature_of(batch)


def _captured(
    model: nn.Module,
    batch: object,
    *,
    training: bool,
    autocast: Autocast | None,
    opaque: Sequence[str],
    loss_fn: LossFunction | None,
    cache_dir: Path | None,
) -> tuple[CapturedGraph, bool]:
    """The captured graph, and whether it was kept from an earlier run."""
    with forward_with_loss(model, loss_fn):
        path = None
        if cache_dir is not None:
            num_samples = 0 if isinstance(batch, InputSignature) else num_samples_of(flatten_batch(batch))
            extra = [*opaque, str(num_samples), describe_loss_fn(loss_fn)]
            key = capture_key(model, _signature(batch), training, autocast, extra=extra)
            path = None if key is None else cache_dir / key
        if path is not None and path.exists():
            try:
                return load_graph(path), True
            except StoreError:  # of another version or damaged: capture again, leave it alone
                path = None
        graph = capture(model, batch, training=training, autocast=autocast, opaque=opaque)
    if path is not None:
        with contextlib.suppress(StoreError):  # something without a stored form: captured again next time
            save_graph(graph, path)
    return graph, False


def partition_of(
    model: nn.Module,
    graph: CapturedGraph,
    *,
    cut_points: Sequence[str] | None = None,
    like: Partition | None = None,
) -> Partition:
    """Cuts and splits a graph that was captured from ``model``."""
    flow = flow_of(graph, model)
    if like is not None:
        return split(model, flow, positions_like(flow, model, like))
    return split(model, flow, find_cut_points(flow, model, cut_points))
