"""Random numbers keyed by position: (seed, step, micro-batch, section), never by what ran before.

So dropout is the same for every number of stages and pipelines at a given micro-batch size, and recompute
draws the same numbers again by seeding again: no generator state is ever saved for it.

Keys are blake2b of the five integers, cut to 64 bits. Domains keep training, evaluation, initialisation and
data apart. The layout of the key is part of the format of a run: changing it changes every run's dropout.
"""

from __future__ import annotations

import contextlib
import enum
import hashlib
import struct
from collections.abc import Iterator

import torch

_KEY = struct.Struct("<qqqqq")
_WORD = struct.Struct("<Q")
_MASK = (1 << 64) - 1


class Domain(enum.IntEnum):
    """What the numbers are for; part of the key."""

    TRAIN = 0
    EVALUATE = 1
    INIT = 2
    DATA = 3


def seed_for(
    seed: int,
    step_index: int,
    micro_batch_index: int,
    section_index: int,
    *,
    domain: Domain = Domain.TRAIN,
) -> int:
    """64-bit seed of one section's run of one micro-batch; the same on every machine and version.

    ``micro_batch_index`` counts within the global batch (k of the step), not within a pipeline.
    """
    key = _KEY.pack(_signed(seed), int(domain), step_index, micro_batch_index, section_index)
    word: int = _WORD.unpack(hashlib.blake2b(key, digest_size=8).digest())[0]
    return word


def _signed(seed: int) -> int:
    """Any integer seed as the 64-bit one with the same low bits."""
    return ((seed + (1 << 63)) & _MASK) - (1 << 63)


def seed_generators(value: int, device: torch.device) -> None:
    """Set the default CPU generator, and the device's default generator if it is a CUDA device."""
    torch.default_generator.manual_seed(value)
    if device.type == "cuda":
        _cuda_generator(device).manual_seed(value)


def seed_section(
    seed: int,
    step_index: int,
    micro_batch_index: int,
    section_index: int,
    device: torch.device,
    *,
    domain: Domain = Domain.TRAIN,
) -> None:
    """Seed the default generators for one section's run of one micro-batch (forward or recompute)."""
    seed_generators(seed_for(seed, step_index, micro_batch_index, section_index, domain=domain), device)


@contextlib.contextmanager
def preserved_generators(device: torch.device) -> Iterator[None]:
    """Give the user's default generators back as they were: training must not touch their numbers."""
    cpu_state = torch.default_generator.get_state()
    cuda_state = _cuda_generator(device).get_state() if device.type == "cuda" else None
    try:
        yield
    finally:
        torch.default_generator.set_state(cpu_state)
        if cuda_state is not None:
            _cuda_generator(device).set_state(cuda_state)


def _cuda_generator(device: torch.device) -> torch.Generator:
    torch.cuda.init()  # type: ignore[no-untyped-call]
    index = device.index if device.index is not None else torch.cuda.current_device()
    return torch.cuda.default_generators[index]
