"""A worker's own sections as the engine sees them: forward, recompute, backward of one micro-batch.

The engine (``engine.py``) decides when; this module does the arithmetic. Tensors that arrive from the neighbour
are leaves of a private autograd graph per micro-batch; ``backward`` returns their gradients. What a split
backward puts off is ``deferred.py``'s, how gradients add up ``inplace.py``'s.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.errors import DataError, ProtocolError
from varuna.partition import InputSignature, Section
from varuna.run.deferred import PendingWeights
from varuna.run.engine import Message
from varuna.run.inplace import InPlaceWeights
from varuna.run.precision import AutocastSpec
from varuna.run.random import seed_section
from varuna.run.stage_sections import StageSections


@dataclass(frozen=True, kw_only=True)
class StageInputs:
    """User inputs of one micro-batch on this worker's device.

    ``tensors`` holds flat inputs by key, each of shape ``[num_samples, ...]``; it is empty on a stage that
    needs none. ``weight`` overrides the loss weight if the user gave ``loss_weight``.
    """

    signature: InputSignature | None
    tensors: Mapping[str, Tensor]
    num_samples: int
    weight: float | None = None


@dataclass(slots=True)
class _InFlight:
    """What one micro-batch leaves behind between its forward and its backward."""

    inputs: StageInputs
    signature: InputSignature | None
    sections: Sequence[Section] = ()
    received: tuple[Tensor, ...] = ()
    outputs: tuple[Tensor, ...] = ()
    loss_sum: Tensor | None = None
    weights: PendingWeights | None = None


@dataclass(frozen=True, kw_only=True)
class LossTotals:
    """Sums over the micro-batches of one step that this stage ran (zero but on the last stage).

    ``first_non_finite`` is the first micro-batch whose loss was inf or nan.
    """

    loss_sum: float
    weight: float
    first_non_finite: int | None


class ModelStage:
    """Runs this worker's sections; implements the engine's ``StageProgram``.

    Args:
        sections: this stage's sections by signature.
        load: micro-batch index, and whether a section needs data of it, to inputs; blocks until they are there.
        is_last: whether the loss is computed here.
        training: False runs forward without a graph and sums the loss.
        autocast: precision of the forward pass.
        seed: the job's seed, for keyed random numbers.
        device: where this worker computes.
        before_final_backward: called just before the last task of a step (starts gradient reduction): the last
            backward, without argument, or the last weight gradients, with how often each gradient will still be
            added to.
    """

    def __init__(
        self,
        *,
        sections: StageSections,
        load: Callable[[int, bool], StageInputs],
        is_first: bool,
        is_last: bool,
        training: bool,
        autocast: AutocastSpec,
        seed: int,
        device: torch.device,
        before_final_backward: Callable[..., None] | None = None,
    ) -> None:
        self._sections = sections
        self._load = load
        self._is_first = is_first
        self._is_last = is_last
        self._training = training
        self._autocast = autocast
        self._seed = seed
        self._device = device
        self._before_final_backward = before_final_backward
        self._in_place = InPlaceWeights(device) if training and not sections.split else None
        self._in_flight: dict[int, _InFlight] = {}
        self._pending: dict[int, PendingWeights] = {}
        self._losses: dict[int, Tensor] = {}
        self._weight = 0.0
        self._step_index = 0
        self._gradient_scale = 1.0

    def begin_step(self, step_index: int, gradient_scale: float = 1.0) -> None:
        """Forget what an earlier (perhaps broken) step left; start counting loss and weight from zero."""
        self._step_index = step_index
        self._gradient_scale = gradient_scale
        self._in_flight.clear()
        self._pending.clear()
        self._losses.clear()
        self._weight = 0.0

    def totals(self) -> LossTotals:
        """Loss and weight of the micro-batches since ``begin_step``; waits for the device."""
        if not self._losses:
            return LossTotals(loss_sum=0.0, weight=0.0, first_non_finite=None)
        losses = torch.stack([loss.double() for loss in self._losses.values()]).cpu()
        bad = (~torch.isfinite(losses)).nonzero().flatten().tolist()
        return LossTotals(
            loss_sum=losses.sum().item(),
            weight=self._weight,
            first_non_finite=list(self._losses)[bad[0]] if bad else None,
        )

    # --- the engine's side ------------------------------------------------------------------

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        """Run this stage's sections forward; return what crosses the next cut (None after the last stage)."""
        inputs = self._load(micro_batch_index, False)
        signature = self._signature_of(inputs, received)
        sections = self._sections.sections(signature, inputs.num_samples)
        if not inputs.tensors and any(section.input_keys for section in sections):
            inputs = self._load(micro_batch_index, True)
            self._signature_of(inputs, received)
        held = _InFlight(inputs=inputs, signature=signature, sections=sections)
        if received is not None:
            held.received = self._receive(held.sections[0], received)
        save = save_activations and self._training
        if save and self._sections.split:
            held.weights = PendingWeights(self._device)
        with torch.set_grad_enabled(save):
            outputs = self._run_sections(micro_batch_index, held)
        if self._is_last:
            self._finish_loss(micro_batch_index, held, outputs, keep_graph=save)
        if self._training:
            if save:
                held.outputs = outputs
            self._in_flight[micro_batch_index] = held
        if self._is_last:
            return None
        text = "" if signature is None else signature.to_json()
        return Message(values=tuple(value.detach() for value in outputs), signature=text)

    def recompute(self, micro_batch_index: int) -> None:
        """Run forward again with a graph, without touching buffers a second time."""
        held = self._in_flight[micro_batch_index]
        if self._sections.split:
            held.weights = PendingWeights(self._device)
        with torch.enable_grad():
            outputs = self._run_sections(micro_batch_index, held, preserve_buffers=True)
        if self._is_last:
            parts = self._loss_parts(held, outputs)
            held.loss_sum = parts[0]
        else:
            held.outputs = outputs

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool = False
    ) -> Message | None:
        """Run backward; return gradients of what was received (None on the first stage)."""
        held = self._in_flight.pop(micro_batch_index)
        assert split == (held.weights is not None), "what backward puts off is collected from forward on"
        if is_final and not split and self._before_final_backward is not None:
            self._before_final_backward()
        if self._is_last:
            self._backward_loss(held)
        else:
            assert gradients is not None
            self._backward_outputs(held, gradients)
        if held.weights is not None:
            self._pending[micro_batch_index] = held.weights
        if self._is_first:
            return None
        return Message(values=tuple(value.grad for value in held.received))

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        """Make and add the weight gradients that ``backward`` put off; free what they needed."""
        pending = self._pending.pop(micro_batch_index)
        if is_final and self._before_final_backward is not None:
            self._before_final_backward(pending.additions())
        pending.run()

    # --- arithmetic -------------------------------------------------------------------------

    def _signature_of(self, inputs: StageInputs, received: Message | None) -> InputSignature | None:
        """The one that travelled with the activations must equal the one of the data read here."""
        if received is None:
            return inputs.signature
        arrived = InputSignature.from_json(received.signature) if received.signature else None
        if inputs.tensors and arrived != inputs.signature:
            raise DataError(
                f"This stage read inputs like {inputs.signature}, the stage before it {arrived}, for the same "
                "micro-batch. The dataset must return the same sample for the same index on every worker; "
                "draw random augmentations from torch, numpy or random generators only."
            )
        return arrived

    def _receive(self, first: Section, message: Message) -> tuple[Tensor, ...]:
        specs = first.received
        if len(specs) != len(message.values):
            raise ProtocolError(
                f"{len(message.values)} tensors arrived where the cut carries {len(specs)} "
                f"({', '.join(spec.name for spec in specs)})."
            )
        received = []
        for spec, value in zip(specs, message.values, strict=True):
            assert value is not None, "activations are never None"
            if value.dtype != spec.dtype:
                raise ProtocolError(f"{spec.name} arrived as {value.dtype}, the cut carries {spec.dtype}.")
            leaf = value.to(self._device, non_blocking=True)
            received.append(leaf.requires_grad_(spec.differentiable and self._training))
        return tuple(received)

    def _run_sections(
        self, micro_batch_index: int, held: _InFlight, *, preserve_buffers: bool = False
    ) -> tuple[Tensor, ...]:
        values: tuple[Tensor, ...] = held.received
        sink = held.weights or self._in_place
        collecting = contextlib.nullcontext() if sink is None else sink.collect(held.sections)
        with self._autocast.context(), collecting:
            for section in held.sections:
                if section.uses_random:
                    seed_section(
                        self._seed, self._step_index, micro_batch_index, section.spec.index, self._device
                    )
                if preserve_buffers and section.mutated_buffers:
                    with section.preserve_buffers():
                        values = section.run(held.inputs.tensors, values)
                else:
                    values = section.run(held.inputs.tensors, values)
        return values

    def _loss_parts(self, held: _InFlight, outputs: tuple[Tensor, ...]) -> tuple[Tensor, float]:
        """Loss summed over the micro-batch (a scalar tensor with a graph), and its weight."""
        partition = self._sections.partition(held.signature, held.inputs.num_samples)
        parts = partition.loss_of(outputs, held.inputs.num_samples)
        weight = held.inputs.weight
        if weight is None:
            return parts.sum, parts.weight
        if weight == 0:  # a mean over nothing is nan: such a micro-batch counts for nothing instead
            return parts.sum.new_zeros(()), 0.0
        return parts.sum * (weight / parts.weight), weight

    def _finish_loss(
        self, micro_batch_index: int, held: _InFlight, outputs: tuple[Tensor, ...], *, keep_graph: bool
    ) -> None:
        loss_sum, weight = self._loss_parts(held, outputs)
        self._losses[micro_batch_index] = loss_sum.detach()
        self._weight += weight
        if keep_graph:
            held.loss_sum = loss_sum

    def _backward_loss(self, held: _InFlight) -> None:
        loss_sum = held.loss_sum
        assert loss_sum is not None
        if loss_sum.requires_grad:
            seed = torch.full_like(loss_sum, self._gradient_scale)
            torch.autograd.backward(loss_sum, seed)

    def _backward_outputs(self, held: _InFlight, gradients: Message) -> None:
        pairs = [
            (output, gradient.to(self._device, non_blocking=True))
            for output, gradient in zip(held.outputs, gradients.values, strict=True)
            if gradient is not None and output.requires_grad
        ]
        if pairs:
            torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
