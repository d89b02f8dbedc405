"""Memory to receive messages into, recycled where that pays.

Fresh memory costs a page fault for every 4 KB at its first touch: for large messages that takes as long as
the transfer on a fast network. So large tensors of one channel lie in mapped regions of their own, backed by
huge pages where the kernel has them, and a region goes back to its channel when the last tensor on it dies.
"""

from __future__ import annotations

import mmap
import weakref
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from varuna.run.tensor_bytes import DTYPES, TensorInfo, allocate

RECYCLED_BYTES = 2 << 20
"""Tensors from this size on are recycled here; smaller ones come from torch, whose allocator recycles them."""

MAX_FREE_REGIONS = 2
"""Regions that a channel keeps while no tensor uses them."""


class ReceiveMemory:
    """Makes the tensors of incoming messages.

    Args:
        pin_memory: allocate pinned memory, which torch recycles itself.
    """

    def __init__(self, *, pin_memory: bool = False) -> None:
        self._pin_memory = pin_memory
        self._free: deque[mmap.mmap] = deque(maxlen=MAX_FREE_REGIONS)

    def allocate(self, infos: Sequence[TensorInfo | None]) -> tuple[Tensor | None, ...]:
        """Uninitialised CPU tensors, each with its own storage; None where there is no tensor."""
        if self._pin_memory:
            return allocate(infos, pin_memory=True)
        return tuple([self._allocate_one(info) for info in infos])

    def _allocate_one(self, info: TensorInfo | None) -> Tensor | None:
        if info is None or info.num_bytes < RECYCLED_BYTES:
            return allocate((info,))[0]
        region = self._region(info.num_bytes)
        lease = memoryview(region)[: info.num_bytes]
        # The storage holds the lease, not the region: the lease dies with the last tensor on it.
        weakref.finalize(lease, self._free.append, region).atexit = False
        return torch.frombuffer(lease, dtype=torch.uint8).view(DTYPES[info.dtype]).view(info.shape)

    def _region(self, num_bytes: int) -> mmap.mmap:
        """A free region of about this size, or a new one; free ones of other sizes are dropped."""
        size = -(-num_bytes // RECYCLED_BYTES) * RECYCLED_BYTES
        while self._free:
            region = self._free.popleft()
            if len(region) == size:
                return region
        region = mmap.mmap(-1, size)
        region.madvise(mmap.MADV_HUGEPAGE)
        return region
