"""One pass through neighbouring sections, forward and then backward, each section timed or weighed by itself.

The sections run as a stage runs them (``stage.py``): the same calls, keyed random numbers, gradients added to
those that are there. Between sections the values are cut off from their graph, as between stages.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from varuna.partition import Partition, Section
from varuna.partition.program import GraphProgram
from varuna.run.deferred import PendingWeights
from varuna.run.inplace import InPlaceWeights
from varuna.run.measure_bytes import KeptBytes, Peak, num_bytes
from varuna.run.precision import AutocastSpec
from varuna.run.random import seed_section
from varuna.run.weight_calls import tapped

_Moment = float | torch.cuda.Event
_Span = tuple[_Moment, _Moment]

_SHORTEST_S = 1e-9

_TINY = 1e-3
"""What is back-propagated where no later section gives a gradient."""


@dataclass(frozen=True, kw_only=True)
class Chain:
    """Neighbouring sections to be measured together.

    Attributes:
        partition: whose they are; for this number of samples.
        first_section, end_section: which.
        autocast, seed, device: as in the run.
    """

    partition: Partition
    first_section: int
    end_section: int
    autocast: AutocastSpec
    seed: int
    device: torch.device

    @cached_property
    def sections(self) -> Sequence[Section]:
        """The sections, as a stage has them."""
        return [tapped(section) for section in self.partition.sections[self.first_section : self.end_section]]

    @cached_property
    def in_place(self) -> InPlaceWeights:
        """Adds gradients up, as in a stage."""
        return InPlaceWeights(self.device)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """What goes in: inputs by key, values of the cut before the first section, how many samples they are."""

    inputs: Mapping[str, Tensor]
    received: tuple[Tensor, ...]
    num_samples: int


@dataclass(kw_only=True)
class SectionBytes:
    """What one section takes at one micro-batch size; see ``TaskCosts``."""

    activation_bytes: int = 0
    weight_bytes: int = 0
    workspace_bytes: int = 0
    output_bytes: int = 0
    gradient_bytes: int = 0


@dataclass(kw_only=True)
class SectionTimes:
    """Seconds of one section, one entry per pass; of a split backward both parts and the second's share."""

    forward_s: list[float] = field(default_factory=list)
    recompute_s: list[float] = field(default_factory=list)
    backward_s: list[float] = field(default_factory=list)
    split_s: list[float] = field(default_factory=list)
    weight_share: list[float] = field(default_factory=list)


@dataclass(kw_only=True)
class _Held:
    """What a section's forward leaves for its backward."""

    received: tuple[Tensor, ...]
    outputs: tuple[Tensor, ...] = ()


def timed_pass(chain: Chain, batch: Batch, times: Sequence[SectionTimes]) -> None:
    """Run once and add what each section took to ``times``."""
    clock = _Clock(chain.device)
    forward: list[_Span] = []
    backward: list[_Span] = []
    held: list[_Held] = []
    values = batch.received
    with _as_in_a_run(chain):
        for section in chain.sections:
            held.append(_Held(received=_leaves(section, values)))
            start = clock.now()
            values = held[-1].outputs = _run(chain, section, batch, held[-1].received)
            forward.append((start, clock.now()))
    gradients: Sequence[Tensor | None] | None = None
    while held:
        last = held.pop()
        start = clock.now()
        gradients = _backward(last, gradients)
        backward.append((start, clock.now()))
    clock.finish()
    for taken, forward_span, backward_span in zip(times, forward, reversed(backward), strict=True):
        taken.forward_s.append(clock.seconds(*forward_span))
        taken.backward_s.append(clock.seconds(*backward_span))


def timed_recompute(chain: Chain, batch: Batch, times: Sequence[SectionTimes]) -> None:
    """Run forward once as a recompute does: buffers stay as they are."""
    clock = _Clock(chain.device)
    spans: list[_Span] = []
    values = batch.received
    with _as_in_a_run(chain):
        for section in chain.sections:
            received = _leaves(section, values)
            with section.preserve_buffers():
                start = clock.now()
                values = _run(chain, section, batch, received)
                spans.append((start, clock.now()))
    clock.finish()
    for taken, span in zip(times, spans, strict=True):
        taken.recompute_s.append(clock.seconds(*span))


def split_pass(
    chain: Chain, batch: Batch, split: Collection[int], times: Sequence[SectionTimes]
) -> dict[int, int]:
    """Run once with backward in two parts in some sections; add the second part's share to ``times``.

    Args:
        chain: what runs.
        batch: on what.
        split: positions of these sections in the chain; the others run as usual.
        times: per section.

    Returns:
        Bytes kept from the first part to the second, by position.
    """
    clock = _Clock(chain.device)
    pending = {index: PendingWeights(chain.device) for index in split}
    held: list[_Held] = []
    values = batch.received
    with _as_in_a_run(chain):
        for index, section in enumerate(chain.sections):
            held.append(_Held(received=_leaves(section, values)))
            with pending[index].collect([section]) if index in pending else contextlib.nullcontext():
                values = held[-1].outputs = _run(chain, section, batch, held[-1].received)
    kept: dict[int, int] = {}
    spans: dict[int, tuple[_Span, _Span]] = {}
    gradients: Sequence[Tensor | None] | None = None
    for index in reversed(range(len(held))):
        last = held.pop()
        if index not in split:
            gradients = _backward(last, gradients)
            continue
        start = clock.now()
        with pending[index].collect([chain.sections[index]]):
            gradients = _backward(last, gradients)
        middle = clock.now()
        kept[index] = pending[index].num_bytes
        pending[index].run()
        spans[index] = ((start, middle), (middle, clock.now()))
    clock.finish()
    for index, (first, second) in spans.items():
        first_s, second_s = clock.seconds(*first), clock.seconds(*second)
        times[index].split_s.append(first_s + second_s)
        times[index].weight_share.append(second_s / max(first_s + second_s, _SHORTEST_S))
    return kept


def weighed_pass(chain: Chain, batch: Batch) -> list[SectionBytes]:
    """Run once and count bytes. Gradients of parameters must be there already, or they count as workspace."""
    found = [SectionBytes() for _ in chain.sections]
    held: list[_Held] = []
    values = batch.received
    with _as_in_a_run(chain):
        for taken, section in zip(found, chain.sections, strict=True):
            received = _leaves(section, values)
            with KeptBytes(_kept_anyway(section, batch, received)) as kept:
                peak = Peak(chain.device)
                values = _run(chain, section, batch, received)
            kept.add(values)
            taken.activation_bytes = kept.total
            taken.workspace_bytes = max(0, peak.beyond_start() - kept.total)
            if not _is_last(chain, section):
                taken.output_bytes = num_bytes(values)
                taken.gradient_bytes = num_bytes(value for value in values if value.requires_grad)
            held.append(_Held(received=received, outputs=values))
    gradients: Sequence[Tensor | None] | None = None
    for taken in reversed(found):
        last = held.pop()
        values = ()
        peak = Peak(chain.device)
        gradients = _backward(last, gradients)
        beyond = peak.beyond_start() - num_bytes(gradients)
        taken.workspace_bytes = max(taken.workspace_bytes, beyond)
    return found


@contextlib.contextmanager
def _as_in_a_run(chain: Chain) -> Iterator[None]:
    with torch.enable_grad(), chain.autocast.context(), chain.in_place.collect(chain.sections):
        yield


def _leaves(section: Section, values: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a section receives, cut off from where it came from."""
    return tuple(
        value.detach().requires_grad_(spec.differentiable)
        for value, spec in zip(values, section.received, strict=True)
    )


def _kept_anyway(section: Section, batch: Batch, received: Sequence[Tensor]) -> list[Tensor]:
    constants = section.program.constants if isinstance(section.program, GraphProgram) else ()
    inputs = [batch.inputs[key] for key in section.input_keys]
    return [*section.parameters.values(), *section.buffers.values(), *constants, *inputs, *received]


def _is_last(chain: Chain, section: Section) -> bool:
    return section.spec.index == len(chain.partition.sections) - 1


def _run(chain: Chain, section: Section, batch: Batch, received: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    """A section's forward; the last section's includes the loss, which then is the only output."""
    if section.uses_random:
        seed_section(chain.seed, 0, 0, section.spec.index, chain.device)
    outputs = section.run(batch.inputs, received)
    if not _is_last(chain, section):
        return outputs
    return (chain.partition.loss_of(outputs, batch.num_samples).sum,)


def _backward(held: _Held, gradients: Sequence[Tensor | None] | None) -> list[Tensor | None]:
    """Backward of one section; gradients of what it received."""
    if gradients is None:
        gradients = [torch.full_like(output, _TINY) for output in held.outputs]
    pairs = [
        (output, gradient)
        for output, gradient in zip(held.outputs, gradients, strict=True)
        if gradient is not None and output.requires_grad
    ]
    if pairs:
        torch.autograd.backward([output for output, _ in pairs], [gradient for _, gradient in pairs])
    return [value.grad for value in held.received]


class _Clock:
    """Times on a device: the processor's clock, or events of the current CUDA stream."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"

    def now(self) -> _Moment:
        """A point in the device's time."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(torch.cuda.current_stream(self._device))
        return event

    def finish(self) -> None:
        """Wait until the device has passed all points."""
        if self._is_cuda:
            torch.cuda.synchronize(self._device)

    def seconds(self, start: _Moment, end: _Moment) -> float:
        """Between two points; call ``finish`` first."""
        if isinstance(start, float):
            assert isinstance(end, float)
            return end - start
        assert isinstance(end, torch.cuda.Event)
        return float(start.elapsed_time(end)) / 1e3
