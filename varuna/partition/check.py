"""Start-up check: one split step against one unsplit step, on the real weights and a small batch.

Both run in this process, with the same random numbers drawn in the same order, so that dropout agrees. The
model's gradients, buffers, modes and the default generators are as before afterwards.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from varuna.errors import CheckFailed
from varuna.partition.effects import arguments_of
from varuna.partition.fakes import training_mode
from varuna.partition.graph import Autocast
from varuna.partition.locate import first_difference
from varuna.partition.loss import loss_of, read_output
from varuna.partition.loss_fn import LossFunction, forward_with_loss
from varuna.partition.program import BufferSlot, GraphProgram, buffer_slot, preserved
from varuna.partition.section import Partition
from varuna.partition.signature import call_arguments, flatten_batch, num_samples_of

TOLERANCES = {torch.float64: 1e-9, torch.float32: 1e-3, torch.float16: 5e-2, torch.bfloat16: 1e-1}
TF32_TOLERANCE = 2e-2  # matrix products of CUDA devices may round fp32 to 10 bits
SMALL_SHARE = 1e-3  # gradients this much smaller than the largest are compared by the largest

_CHECK_SEED = 20_210


@dataclass(frozen=True)
class _Outcome:
    loss: Tensor
    gradients: dict[str, Tensor]


def check_split(
    model: nn.Module,
    partition: Partition,
    batch: object,
    *,
    autocast: Autocast | None = None,
    loss_fn: LossFunction | None = None,
) -> float:
    """Compares loss and gradients of the model's own forward with those of its sections.

    Args:
        model: with all its weights, on one device.
        partition: of this model in train mode.
        batch: a few samples, e.g. 2, of the shape the partition was made for.
        autocast: the run's precision.
        loss_fn: as in ``partition``.

    Returns:
        The largest relative difference.

    Raises:
        CheckFailed: it is larger than rounding explains; names the first section that differs.
    """
    runner = _Runner(model, partition, batch, autocast, loss_fn)
    with runner.undisturbed():
        plain = runner.run_plain()
        split = runner.run_split()
        difference, worst = _difference(plain, split)
        tolerance = tolerance_for(model, autocast)
        if difference <= tolerance:
            return difference
        place = runner.locate(tolerance, _differing(plain, split, tolerance))
    raise CheckFailed(
        f"The model divided into sections does not compute what the model computes. First difference: {place}. "
        f"Loss {plain.loss.item():.9g} as a whole, {split.loss.item():.9g} divided; largest relative "
        f"difference "
        f"{difference:.3g} in {worst}, where {tolerance:.0e} is allowed. Something in forward is not visible "
        f"to capture "
        "(Python state that changes, hooks, code that depends on the values); make that module opaque "
        "(opaque=['...']), or train without this check (check=False) if you know why."
    )


def why_not_checked(
    model: nn.Module, partition: Partition, device: torch.device, available_bytes: int | None = None
) -> str:
    """The reason why the check cannot be made here; empty if it can.

    Args:
        model: the user's model.
        partition: of it.
        device: where the check would run.
        available_bytes: memory that is free for it, if known.
    """
    if any(parameter.is_meta for parameter in model.parameters()):
        return "the model is built on the meta device, so no worker has all weights"
    needed = check_bytes(partition, num_samples=2)
    if available_bytes is not None and needed > available_bytes:
        return f"it needs about {needed / 1e9:.1f} GB, {available_bytes / 1e9:.1f} GB are free"
    if device.type == "cuda" and any(_draws_in_attention(section.program) for section in partition.sections):
        return "attention with dropout draws other numbers in other CUDA kernels"
    return ""


def check_bytes(partition: Partition, num_samples: int) -> int:
    """Memory that the check needs beyond the model itself: two sets of gradients and one set of activations."""
    parameters = {id(p): p for section in partition.sections for p in section.parameters.values()}
    gradients = sum(p.numel() * p.element_size() for p in parameters.values() if p.requires_grad)
    return 2 * gradients + num_samples * sum(section.activation_bytes for section in partition.sections)


def tolerance_for(model: nn.Module, autocast: Autocast | None) -> float:
    """Relative difference that rounding alone may make."""
    dtypes = {p.dtype for p in model.parameters()} | {getattr(autocast, "dtype", None)}
    tolerance = max((TOLERANCES.get(dtype, 0.0) for dtype in dtypes if dtype is not None), default=1e-3)
    on_cuda = any(p.device.type == "cuda" for p in model.parameters())
    if on_cuda and torch.float32 in dtypes and torch.backends.cuda.matmul.allow_tf32:
        tolerance = max(tolerance, TF32_TOLERANCE)
    return tolerance


class _Runner:
    def __init__(
        self,
        model: nn.Module,
        partition: Partition,
        batch: object,
        autocast: Autocast | None,
        loss_fn: LossFunction | None,
    ) -> None:
        flat = flatten_batch(batch)
        self._model = model
        self._partition = partition
        self._loss_fn = loss_fn
        self._autocast = autocast
        self._tree = flat.tree
        self._num_samples = num_samples_of(flat)
        self._device = next((p.device for p in model.parameters()), torch.device("cpu"))
        self._given = {key: tensor.to(self._device) for key, tensor in flat.tensors.items()}

    @property
    def _inputs(self) -> dict[str, Tensor]:
        """The batch, anew for every run: forward may change it in place."""
        return {key: tensor.clone() for key, tensor in self._given.items()}

    @contextlib.contextmanager
    def undisturbed(self) -> Iterator[None]:
        """Puts gradients, buffers, modes and generators back."""
        gradients = [(parameter, parameter.grad) for parameter in self._model.parameters()]
        devices = [self._device] if self._device.type == "cuda" else []
        try:
            with (
                torch.random.fork_rng(devices=devices),
                training_mode(self._model, self._partition.training),
                torch.enable_grad(),
            ):
                yield
        finally:
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def run_plain(self) -> _Outcome:
        """The model's own forward and backward."""
        with self._fresh():
            return self._outcome(self._plain_loss())

    def run_split(self) -> _Outcome:
        """All sections in order, as one graph."""
        with self._fresh():
            values: tuple[Tensor, ...] = ()
            inputs = self._inputs
            with self._precision():
                for section in self._partition.sections:
                    values = section.run(inputs, values)
                loss = self._partition.loss_of(values, self._num_samples).sum
            return self._outcome(loss)

    def locate(self, tolerance: float, differing: set[str]) -> str:
        """Where the two first differ, for the error message."""

        def run_plain() -> None:
            with self._fresh(), torch.no_grad():
                self._plain_loss()

        with self._fresh(), self._precision(), torch.no_grad():
            traced = []
            values: tuple[Tensor, ...] = ()
            inputs = self._inputs
            for section in self._partition.sections:
                seen, values = section.program.trace(inputs, values)
                traced.append(seen)
        return first_difference(
            self._model,
            self._partition,
            traced,
            run_plain=run_plain,
            tolerance=tolerance,
            differing=differing,
        )

    @contextlib.contextmanager
    def _fresh(self) -> Iterator[None]:
        """The same start for each run: no gradients, copies of the buffers, the same random numbers."""
        for parameter in self._model.parameters():
            parameter.grad = None
        torch.manual_seed(_CHECK_SEED)
        with preserved(_all_slots(self._model)):
            yield

    def _precision(self) -> contextlib.AbstractContextManager[object]:
        return contextlib.nullcontext() if self._autocast is None else self._autocast.context()

    def _plain_loss(self) -> Tensor:
        args, kwargs = call_arguments(self._tree, self._inputs)
        with self._precision(), forward_with_loss(self._model, self._loss_fn):
            spec, outputs = read_output(self._model(*args, **kwargs))
            return loss_of(spec, outputs, self._num_samples).sum

    def _outcome(self, loss: Tensor) -> _Outcome:
        if loss.requires_grad:
            torch.autograd.backward(loss)
        gradients = {name: p.grad for name, p in self._model.named_parameters() if p.grad is not None}
        return _Outcome(loss.detach(), gradients)


def _all_slots(model: nn.Module) -> list[BufferSlot]:
    return [buffer_slot(model, name) for name, _ in model.named_buffers(remove_duplicate=False)]


def _differences(plain: _Outcome, split: _Outcome) -> Mapping[str, float]:
    """Relative difference of every gradient and of the loss; a missing gradient is zero."""
    largest = max((float(g.abs().max()) for g in plain.gradients.values() if g.numel()), default=0.0)
    found = {"the loss": _relative(plain.loss, split.loss, 0.0)}
    for name in plain.gradients.keys() | split.gradients.keys():
        ours, theirs = split.gradients.get(name), plain.gradients.get(name)
        present = ours if ours is not None else theirs
        assert present is not None
        zeros = torch.zeros_like(present)
        found[name] = _relative(
            zeros if theirs is None else theirs, zeros if ours is None else ours, SMALL_SHARE * largest
        )
    return found


def _difference(plain: _Outcome, split: _Outcome) -> tuple[float, str]:
    found = _differences(plain, split)
    worst = max(found, key=lambda name: found[name])
    return found[worst], worst if worst == "the loss" else f"the gradient of {worst}"


def _differing(plain: _Outcome, split: _Outcome, tolerance: float) -> set[str]:
    return {name for name, value in _differences(plain, split).items() if value > tolerance}


def _relative(expected: Tensor, found: Tensor, floor: float) -> float:
    if expected.numel() == 0:
        return 0.0
    scale = max(float(expected.abs().max()), floor)
    difference = float((expected - found).abs().max())
    if math.isnan(difference):  # both not finite in the same way is no difference
        same = torch.equal(expected.isfinite(), found.isfinite())
        return 0.0 if same else float("inf")
    return difference / scale if scale > 0.0 else difference


def _draws_in_attention(program: object) -> bool:
    if not isinstance(program, GraphProgram):
        return False
    attention = torch.ops.aten.scaled_dot_product_attention.default
    return any(
        node.target is attention and arguments_of(node, attention)["dropout_p"] != 0.0
        for node in program.module.graph.nodes
    )
