"""``Section`` and ``Partition``: what the rest of Varuna sees of a divided model.

A section is run like a function. The loop over a stage is

::

    values = received                                  # () on the first stage
    for section in sections[first:end]:
        values = section.run(inputs, values)           # inputs: the user's tensors by key

so any run of neighbouring sections composes: ``sections[i].sent == sections[i + 1].received``. Parameters
and buffers are the user's own objects; nothing is copied.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol

import torch
from torch import Tensor, nn

from varuna.partition.loss import LossParts, OutputSpec, loss_of
from varuna.partition.signature import InputSignature
from varuna.spec import SectionSpec


@dataclass(frozen=True, kw_only=True)
class ValueSpec:
    """A tensor that crosses a cut.

    Attributes:
        name: unique in the model; the same on both sides of the cut.
        dtype: of the tensor.
        differentiable: whether a gradient may come back for it.
        shape: sizes for ``example_batch_size`` samples; () if unknown before running.
        batch_dim: dimension whose size is exactly the number of samples, or None.
    """

    name: str
    dtype: torch.dtype
    differentiable: bool
    shape: tuple[int, ...]
    batch_dim: int | None


@dataclass(frozen=True, kw_only=True)
class BufferRule:
    """How copies of a buffer that forward changes are joined after a step.

    Attributes:
        kind: ``affine``: every forward does ``buffer = decay * buffer + x`` (running statistics; counters with
            decay 1); ``mean``: unknown change, copies are averaged.
        decay: for ``affine`` only.
    """

    kind: Literal["affine", "mean"]
    decay: float = 1.0


class Program(Protocol):
    """What a section runs."""

    def __call__(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor], preserve: bool
    ) -> tuple[Tensor, ...]:
        """Forward; with ``preserve`` the model's buffers stay as they are."""

    def trace(
        self, inputs: Mapping[str, Tensor], received: Sequence[Tensor]
    ) -> tuple[list[tuple[str, Tensor]], tuple[Tensor, ...]]:
        """Forward, one operator at a time, buffers unchanged: (module path, value) in order, and what is
        sent.
        """

    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that it reads, by the user's names."""


@dataclass(kw_only=True, eq=False)
class Section:
    """What lies between two neighbouring cut points; the unit of placement.

    Attributes:
        spec: its numbers.
        parameters: the user's own, by their first names in ``named_parameters()``; a tied one may be in several
            sections.
        mutated_buffers: buffers that its forward changes, with the rule to join copies.
        input_keys: tensors of the batch that it reads.
        received, sent: values at the cuts before and after it. The last section sends the model's outputs.
        uses_random: whether its forward draws random numbers.
        activation_bytes: bytes of all values it computes for one sample; an upper bound of what backward needs.
    """

    spec: SectionSpec
    parameters: dict[str, nn.Parameter]
    mutated_buffers: dict[str, BufferRule]
    input_keys: tuple[str, ...]
    received: tuple[ValueSpec, ...]
    sent: tuple[ValueSpec, ...]
    uses_random: bool
    activation_bytes: int = 0
    program: Program = field(repr=False)
    _preserve: bool = field(default=False, repr=False)

    @property
    def buffers(self) -> dict[str, Tensor]:
        """The model's buffers that it reads, as they are now, by the user's names."""
        return self.program.buffers()

    def run(self, inputs: Mapping[str, Tensor], received: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Forward. The tensors of ``inputs`` and ``received`` are not changed.

        Args:
            inputs: the batch by key; at least ``input_keys``.
            received: matched with ``self.received``.
        """
        return self.program(inputs, received, self._preserve)

    @contextlib.contextmanager
    def preserve_buffers(self) -> Iterator[None]:
        """Inside, ``run`` computes what it would but leaves the model's buffers unchanged (for recompute)."""
        before = self._preserve
        self._preserve = True
        try:
            yield
        finally:
            self._preserve = before


@dataclass(frozen=True, kw_only=True, eq=False)
class Partition:
    """A model as sections.

    Attributes:
        sections: in order; together they are the model's forward, loss included.
        digest: the same text on every worker that cut the same model in the same way.
        signature: the batch it was made for.
        training: made from the model in train mode.
        output_spec: how the last section's outputs are read.
        dynamic_batch: any number of samples; otherwise only ``example_batch_size``.
        example_batch_size: samples that ``ValueSpec.shape`` stands for.
        from_cache: an earlier capture was used again.
    """

    sections: tuple[Section, ...]
    digest: str
    signature: InputSignature
    training: bool
    output_spec: OutputSpec
    dynamic_batch: bool = True
    example_batch_size: int = 1
    from_cache: bool = False

    def loss_of(self, outputs: Sequence[Tensor], num_samples: int) -> LossParts:
        """Sum (differentiable) and weight of the loss of one micro-batch, from what the last section sent."""
        return loss_of(self.output_spec, outputs, num_samples)

    @property
    def specs(self) -> tuple[SectionSpec, ...]:
        """The numbers of all sections."""
        return tuple(section.spec for section in self.sections)
