"""From what the user gave to ``Varuna`` and what the environment says to what a job is started from."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from varuna.config import LayoutConfig, ProfileConfig, TraceConfig, WorldConfig, cache_dir
from varuna.partition.sequential import as_module
from varuna.run.arguments import (
    check_callables,
    check_layout,
    check_names,
    check_scheduler,
    checked_batch_size,
    checked_clip,
    checked_seed,
)
from varuna.run.data import check_dataset
from varuna.run.fetch import CollateFn, MapDataset
from varuna.run.job import JobSpec, LossWeight
from varuna.run.optimizer import check_optimizer
from varuna.run.partitions import PartitionOptions
from varuna.run.precision import AutocastSpec, Precision
from varuna.run.start import StartRequest
from varuna.run.startup import pick_device
from varuna.testing.faults import faults_from_env


def start_request(
    environ: Mapping[str, str],
    *,
    model: nn.Module | Sequence[nn.Module],
    optimizer: Optimizer,
    dataset: MapDataset,
    batch_size: int,
    lr_scheduler: LRScheduler | None,
    precision: str,
    clip_grad_norm: float | None,
    seed: int,
    loss_fn: Callable[..., Any] | None,
    loss_weight: LossWeight | None,
    cut_points: Sequence[str] | None,
    opaque: Sequence[str],
    collate_fn: CollateFn | None,
    num_data_workers: int | None,
    init_weights: Callable[[nn.Module], None] | None,
    layout: LayoutConfig | None,
    check: bool,
    device: torch.device | str | None,
    step_index: Callable[[], int],
) -> StartRequest:
    """Everything checked and put together.

    Args:
        environ: what the launcher and the user set.
        model: this and what follows is as in ``Varuna``.
        optimizer: see there.
        dataset: see there.
        batch_size: see there.
        lr_scheduler: see there.
        precision: see there.
        clip_grad_norm: see there.
        seed: see there.
        loss_fn: see there.
        loss_weight: see there.
        cut_points: see there.
        opaque: see there.
        collate_fn: see there.
        num_data_workers: see there.
        init_weights: see there.
        layout: see there.
        check: see there.
        device: see there.
        step_index: tells the next step, for scripted faults.

    Raises:
        UserError: something here cannot work.
    """
    config = WorldConfig.from_env(environ)
    place = pick_device(config, device)
    check_layout(layout)
    layout = LayoutConfig.from_env(environ).over(layout)
    number_format = Precision.parse(precision)
    autocast = AutocastSpec.of(number_format, place)
    module = as_module(model)
    batch_size = checked_batch_size(batch_size)
    check_dataset(dataset, batch_size)
    check_optimizer(optimizer, module)
    check_scheduler(lr_scheduler, optimizer)
    check_names(cut_points=cut_points, opaque=opaque)
    check_callables(loss_fn=loss_fn, loss_weight=loss_weight, collate_fn=collate_fn, init_weights=init_weights)
    trace = TraceConfig.from_env(environ)
    return StartRequest(
        model=module,
        optimizer=optimizer,
        lr_scheduler=lr_scheduler,
        clip_grad_norm=checked_clip(clip_grad_norm),
        config=config,
        device=place,
        layout=layout,
        precision=number_format,
        check=check and layout.check,
        init_weights=init_weights,
        job=JobSpec(
            dataset=dataset,
            collate_fn=collate_fn,
            num_data_workers=num_data_workers,
            batch_size=batch_size,
            seed=checked_seed(seed),
            autocast=autocast,
            loss_weight=loss_weight,
            token=config.token.encode() or config.run_id.encode(),
            at=faults_from_env(environ, step_index),
        ),
        options=PartitionOptions(
            autocast=autocast,
            cut_points=cut_points,
            opaque=opaque,
            loss_fn=loss_fn,
            cache_dir=cache_dir(environ) / "captures",
        ),
        profile=ProfileConfig.from_env(environ),
        traced_steps=trace.steps if trace is not None else range(0),
    )
