"""Counts bytes while a section is measured: what forward keeps for backward, what a task needs beyond it."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor

from varuna.partition.materialise import return_memory
from varuna.run.memory import peak_memory_bytes, reset_peak_memory, resident_bytes


class KeptBytes:
    """While entered, notes what autograd saves for backward.

    ``total`` counts every storage once, as large as it is, and what is added by ``add``; storages of
    ``excluded`` tensors (parameters, buffers, the section's inputs) are kept anyway and do not count.
    """

    def __init__(self, excluded: Iterable[Tensor]) -> None:
        self._excluded = {_storage_key(tensor) for tensor in excluded if tensor.layout is torch.strided}
        self._sizes: dict[int, int] = {}
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._pack, lambda tensor: tensor)

    @property
    def total(self) -> int:
        """Bytes kept."""
        return sum(self._sizes.values())

    def add(self, tensors: Iterable[Tensor]) -> None:
        """These are kept too: the section's outputs."""
        for tensor in tensors:
            self._note(tensor)

    def __enter__(self) -> KeptBytes:
        self._hooks.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._hooks.__exit__(*error)

    def _pack(self, tensor: Tensor) -> Tensor:
        self._note(tensor)
        return tensor.detach()  # the tensor itself would keep its own graph alive for ever

    def _note(self, tensor: Tensor) -> None:
        if tensor.layout is not torch.strided:  # sparse: no storage of its own, and small
            return
        key = _storage_key(tensor)
        if key not in self._excluded:
            self._sizes[key] = tensor.untyped_storage().nbytes()


class Peak:
    """The most memory that the process held since this was made, beyond what it held then.

    For the CPU it is resident memory, so it also sees what libraries take for themselves; where the system does
    not allow to reset its high-water mark, ``beyond_start`` is 0.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        if device.type == "cpu":
            return_memory()  # what was freed and is still resident would hide as much of what comes
        self._is_reset = reset_peak_memory(device)
        self._start = _held(device)

    def beyond_start(self) -> int:
        """Bytes."""
        return max(0, peak_memory_bytes(self._device) - self._start) if self._is_reset else 0


def _held(device: torch.device) -> int:
    return int(torch.cuda.memory_allocated(device)) if device.type == "cuda" else resident_bytes()


def num_bytes(tensors: Iterable[Tensor | None]) -> int:
    """Of dense copies of these."""
    return sum(tensor.nbytes for tensor in tensors if tensor is not None)


def _storage_key(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
