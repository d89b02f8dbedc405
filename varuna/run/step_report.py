"""One update as the user sees it: from what the commit returned and what was decided."""

from __future__ import annotations

import math

import torch

from varuna.partition import InputSignature
from varuna.run.commit import Committed, Update
from varuna.run.memory import peak_memory_bytes
from varuna.run.startup import tokens_per_sample
from varuna.spec import Step


def step_of(
    committed: Committed,
    update: Update,
    *,
    learning_rates: tuple[float, ...],
    duration_s: float,
    signature: InputSignature,
    device: torch.device,
) -> Step:
    """The step.

    Args:
        committed: what its commit returned.
        update: what followed from that.
        learning_rates: that it used.
        duration_s: of the whole step on this worker.
        signature: of the batch.
        device: of this worker.
    """
    tokens = tokens_per_sample(signature)
    samples_per_s = update.num_samples / duration_s
    return Step(
        index=committed.step_index,
        loss=update.loss,
        weight=update.weight,
        num_samples=update.num_samples,
        grad_norm=update.grad_norm,
        lr=learning_rates[0] if learning_rates else math.nan,
        learning_rates=learning_rates,
        skipped=update.skipped,
        loss_scale=update.loss_scale,
        duration_s=duration_s,
        samples_per_s=samples_per_s,
        tokens_per_s=None if tokens is None else tokens * samples_per_s,
        memory_bytes=peak_memory_bytes(device),
    )
