"""The sections of one stage, for every shape of input, in the form in which the stage runs them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from varuna.partition import InputSignature, Partition, Section
from varuna.run.weight_calls import tapped


class StageSections:
    """Sections of this stage by input signature, so that a change of shape finds its own capture.

    Args:
        first_section, end_section: which sections of every partition belong here.
        partition_for: (signature, number of samples) to partition; signature None is the job's first. Looked up
            for every micro-batch, so it must remember.
        split: their weight gradients are put off.
        training: calls on weights are tapped (``weight_calls.py``).
    """

    def __init__(
        self,
        first_section: int,
        end_section: int,
        partition_for: Callable[[InputSignature | None, int], Partition],
        *,
        split: bool = False,
        training: bool = True,
    ) -> None:
        self.first_section = first_section
        self.end_section = end_section
        self.split = split
        self._training = training
        self._partition_for = partition_for

    def partition(self, signature: InputSignature | None, num_samples: int) -> Partition:
        """The whole partition for a signature."""
        return self._partition_for(signature, num_samples)

    def sections(self, signature: InputSignature | None, num_samples: int) -> Sequence[Section]:
        """This stage's sections for a signature."""
        partition = self.partition(signature, num_samples)
        sections = partition.sections[self.first_section : self.end_section]
        if not self._training:
            return sections
        return [tapped(section) for section in sections]
