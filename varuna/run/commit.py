"""The commit: one all-reduce over all workers, then the same update everywhere with no further message.

``commit`` adds up loss, weight and squared norm (and who saw a non-finite loss first). ``decide`` is pure: from
the committed numbers every worker comes to the same update or the same error, before any weight has changed.
``apply_update`` carries it out.

What is decided:
- The gradient of the sum is divided once, by weight times loss scale (a power of two near the batch size is
  part of what is back-propagated, which rounds nothing); clipping is
  ``torch.nn.utils.clip_grad_norm_``'s arithmetic on the norm over the whole model. Parameters that require a
  gradient count in the norm even if no optimizer group has them.
- fp16 and a non-finite gradient: every worker skips the update and halves the loss scale.
- Other precisions and a non-finite loss or norm: ``NonFiniteLoss`` on every worker.
- Weight zero (every label of the global batch ignored): the update is skipped with loss 0 and norm 0; a plain
  loop would divide zero by zero.
- The learning rate scheduler steps once per update; a skipped step does not step it.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from varuna.errors import LossError, NonFiniteLoss, ProtocolError
from varuna.run.groups import Groups
from varuna.run.precision import LossScaler

_TAG_RANGE = 1 << 15
_NUM_SUMS = 9


@dataclass(frozen=True, kw_only=True)
class SaveMark:
    """Worker 0's wish that the state after a step be saved.

    Attributes:
        sequence: number of the save, from 1 on.
        number: at random, 32 bits: two saves of the same sequence never share files.
    """

    sequence: int
    number: int


@dataclass(frozen=True, kw_only=True)
class CommitPart:
    """What one worker puts into the commit; a spare puts in zeros.

    Attributes:
        generation, step_index: checked to be the same everywhere.
        loss_sum, weight: sums over the micro-batches whose loss this worker computed, without loss scale.
        num_samples: samples of those micro-batches.
        squared_norm: of the reduced gradients (with loss scale) this worker is the first holder of; may be nan.
        non_finite_micro_batch: index in the global batch of the first micro-batch with a non-finite loss here.
        pause: this worker was asked to end the generation after this step.
        save: the state after this step is to be saved; only worker 0 says so.
    """

    generation: int
    step_index: int
    loss_sum: float = 0.0
    weight: float = 0.0
    num_samples: int = 0
    squared_norm: float = 0.0
    non_finite_micro_batch: int | None = None
    pause: bool = False
    save: SaveMark | None = None


@dataclass(frozen=True, kw_only=True)
class NonFiniteSource:
    """Where a non-finite loss was seen first."""

    worker_index: int
    micro_batch_index: int


@dataclass(frozen=True, kw_only=True)
class Committed:
    """What a step's commit returned: sums over all workers, the same numbers on every one.

    Attributes:
        step_index: the step.
        loss_sum, weight, num_samples: of the global batch.
        squared_norm: of the whole gradient, with loss scale; may be nan.
        non_finite_source: the first non-finite loss, if there was one.
        pause: a member asked to end the generation after this step.
        save: the state after this step is to be saved.
    """

    step_index: int
    loss_sum: float
    weight: float
    num_samples: int
    squared_norm: float
    non_finite_source: NonFiniteSource | None = None
    pause: bool = False
    save: SaveMark | None = None


def committed_to_text(committed: Committed) -> str:
    """What ``committed_from_text`` reads; numbers survive exactly, those that are not finite too."""
    return json.dumps(asdict(committed))


def committed_from_text(text: str) -> Committed:
    """The value again."""
    fields = json.loads(text)
    source, save = fields.pop("non_finite_source"), fields.pop("save")
    return Committed(
        **fields,
        non_finite_source=None if source is None else NonFiniteSource(**source),
        save=None if save is None else SaveMark(**save),
    )


@dataclass(frozen=True, kw_only=True)
class Update:
    """What every worker does with its gradients.

    Attributes:
        loss: loss sum over weight.
        weight, num_samples: of the global batch.
        grad_norm: of the whole model's gradient, unscaled, before clipping.
        skipped: no optimizer step this time; ``reason`` says why.
        factor: what gradients are multiplied by.
        loss_scale: the scale this step used.
        scaler: the scaler for the next step.
    """

    loss: float
    weight: float
    num_samples: int
    grad_norm: float
    skipped: bool
    reason: str
    factor: float
    loss_scale: float
    scaler: LossScaler


def commit(groups: Groups, part: CommitPart) -> Committed:
    """THE all-reduce of a step: over all workers, spares included, after their gradients are reduced.

    Raises:
        ProtocolError: workers are at different steps or generations.
        PeerLost: a worker is gone; nothing has changed.
    """
    everyone = groups.all
    vector = everyone.place(torch.tensor(pack(part, groups.world.rank, groups.world.size), dtype=torch.float64))
    everyone.all_reduce_sum(vector)
    return unpack(vector.tolist(), part, groups.world.size)


def pack(part: CommitPart, rank: int, size: int) -> list[float]:
    """One worker's part as numbers to be added up: sums, then a slot per worker for its non-finite loss."""
    tag = _tag(part)
    slots = [0.0] * size
    if part.non_finite_micro_batch is not None:
        slots[rank] = part.non_finite_micro_batch + 1.0
    sums = [part.loss_sum, part.weight, float(part.num_samples), part.squared_norm, tag, tag * tag]
    sequence, number = (0, 0) if part.save is None else (part.save.sequence, part.save.number)
    return [*sums, float(part.pause), float(sequence), float(number), *slots]


def unpack(vector: Sequence[float], part: CommitPart, size: int) -> Committed:
    """The committed numbers; ``ProtocolError`` if the workers' tags were not all equal."""
    loss_sum, weight, num_samples, squared_norm, tag, tag_squared, num_pausing = vector[: _NUM_SUMS - 2]
    sequence, number = (int(value) for value in vector[_NUM_SUMS - 2 : _NUM_SUMS])
    if tag != size * _tag(part) or tag_squared * size != tag * tag:
        raise ProtocolError(
            f"Workers are not at the same step: this one commits step {part.step_index} of generation "
            f"{part.generation}, at least one other a different one."
        )
    seen = [
        NonFiniteSource(worker_index=index, micro_batch_index=int(slot) - 1)
        for index, slot in enumerate(vector[_NUM_SUMS:])
        if slot > 0
    ]
    return Committed(
        step_index=part.step_index,
        loss_sum=loss_sum,
        weight=weight,
        num_samples=int(num_samples),
        squared_norm=squared_norm,
        non_finite_source=min(seen, key=lambda source: source.micro_batch_index, default=None),
        pause=num_pausing > 0,
        save=SaveMark(sequence=sequence, number=number) if sequence else None,
    )


def _tag(part: CommitPart) -> float:
    """A small number that differs between neighbouring steps and generations; sums of its square are exact."""
    return float((part.step_index * 257 + part.generation * 8191) % _TAG_RANGE)


def nominal_weight_of(batch_size: int) -> float:
    """The power of two nearest to the batch size: dividing by it is exact in every number format."""
    return 2.0 ** round(math.log2(batch_size))


def decide(
    committed: Committed, *, clip_grad_norm: float | None, scaler: LossScaler, nominal_weight: float = 1.0
) -> Update:
    """What every worker does next. Pure: equal inputs give the equal update or the equal error.

    Args:
        committed: the sums.
        clip_grad_norm: largest norm of the whole gradient, or None.
        scaler: the scaler whose scale this step's losses were multiplied by.
        nominal_weight: what they were divided by beforehand, a power of two; where it is the global weight
            itself, gradients need no further pass.

    Raises:
        NonFiniteLoss: see the module.
        LossError: the global weight is negative or not finite.
    """
    weight = committed.weight
    finite = math.isfinite(committed.loss_sum) and math.isfinite(committed.squared_norm)
    if not math.isfinite(weight) or weight < 0:
        raise LossError(
            f"Step {committed.step_index}: the global batch's weight is {weight}. The weight that forward "
            f"states must be finite and not negative."
        )
    if not finite and not scaler.enabled:
        raise NonFiniteLoss(_explain(committed))
    overflow = not finite
    reason = ""
    if overflow:
        reason = f"fp16 overflow at loss scale {scaler.scale:g}"
    elif weight == 0:
        reason = "the global batch has weight zero"
    skipped = bool(reason)
    divisor = (weight or 1.0) / nominal_weight * scaler.scale
    grad_norm = math.sqrt(committed.squared_norm) / divisor if finite else math.nan
    factor = 1.0 / divisor
    if clip_grad_norm is not None and not skipped:
        factor *= min(1.0, clip_grad_norm / (grad_norm + 1e-6))
    return Update(
        loss=committed.loss_sum / (weight or 1.0),
        weight=weight,
        num_samples=committed.num_samples,
        grad_norm=grad_norm,
        skipped=skipped,
        reason=reason,
        factor=factor,
        loss_scale=scaler.scale,
        scaler=scaler if weight == 0 and not overflow else scaler.update(overflow),
    )


def _explain(committed: Committed) -> str:
    what = "loss" if not math.isfinite(committed.loss_sum) else "gradient norm"
    where = ""
    if committed.non_finite_source is not None:
        source = committed.non_finite_source
        where = f" First seen in micro-batch {source.micro_batch_index} on worker {source.worker_index}."
    norm = math.sqrt(committed.squared_norm) if committed.squared_norm >= 0 else math.nan
    return (
        f"Step {committed.step_index}: the {what} is not finite (loss sum {committed.loss_sum}, gradient norm "
        f"of the sum {norm}, weight {committed.weight}).{where} No weight was changed. Look for a division by "
        f"zero, a logarithm of zero, bad input data or too large a learning rate."
    )


def apply_update(
    update: Update,
    parameters: Iterable[nn.Parameter],
    optimizer: Optimizer,
    lr_scheduler: LRScheduler | None = None,
) -> None:
    """Carry an update out on the parameters held here, then drop all their gradients.

    ``ReduceLROnPlateau`` is stepped with the committed loss, so it too is the same on every worker.
    """
    held = list(parameters)
    if not update.skipped:
        gradients = [parameter.grad for parameter in held if parameter.grad is not None]
        if gradients and update.factor != 1.0:
            torch._foreach_mul_(gradients, update.factor)
        optimizer.step()
        if lr_scheduler is not None:
            _step_scheduler(lr_scheduler, update.loss)
    for parameter in held:
        parameter.grad = None


def _step_scheduler(lr_scheduler: LRScheduler, loss: float) -> None:
    if isinstance(lr_scheduler, ReduceLROnPlateau):
        lr_scheduler.step(loss)
    else:
        lr_scheduler.step()
