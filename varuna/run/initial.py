"""Initial values that come from somewhere else than the model's own code: a directory of pretrained weights."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from typing import Protocol

import torch
from torch import Tensor, nn

from varuna.partition import canonical_names
from varuna.partition.materialise import set_storage
from varuna.run.partitions import Partitions


class InitialValues(Protocol):
    """Values for some of a model's tensors, read one by one."""

    @property
    def names(self) -> frozenset[str]:
        """Tensors that have a value, by canonical name."""

    def read(self, wanted: Mapping[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
        """Values of some of them in the dtype of those given; CPU tensors that nobody else refers to."""


def give_values(
    model: nn.Module, initial: InitialValues, names: Iterable[str], device: torch.device | str
) -> None:
    """Put initial values into the named tensors, in place; names that have none are left as they are.

    Args:
        model: the user's; what is on the meta device gets storage on ``device``, the rest stays where it is.
        initial: where values come from; nothing else of it is read.
        names: parameters and buffers that this worker holds.
        device: where it computes.
    """
    canonical = canonical_names(model)
    tensors: dict[str, Tensor] = dict(chain(model.named_buffers(), model.named_parameters()))
    wanted = {canonical[name]: tensors[canonical[name]] for name in names if canonical[name] in initial.names}
    for name, value in initial.read(wanted):
        tensor = wanted[name]
        if tensor.is_meta:
            set_storage(tensor, value.to(device))
        else:
            with torch.no_grad():
                tensor.copy_(value)


def unread_buffers(model: nn.Module, partitions: Partitions) -> tuple[str, ...]:
    """Buffers that no section reads: part of no stage, so every worker has them."""
    canonical = canonical_names(model)
    read = {name for section in partitions.reference.sections for name in section.buffers}
    return tuple(name for name, _ in model.named_buffers() if canonical[name] not in read)
