"""Tensors of a checkpoint by name: only what is asked for is read, and all of it is checked.

The checksum is per tensor, not per file, so that a worker that needs one tensor of a large part reads that
tensor and nothing else. crc32 finds every burst of up to 32 bits and any other damage but for one case in four
billion; it is no seal against people.
"""

from __future__ import annotations

import errno
import zlib
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint
from varuna.checkpoint.find import Checkpoint
from varuna.checkpoint.manifest import Place, listed
from varuna.checkpoint.store import Span
from varuna.checkpoint.tree import tensor_names, unflatten
from varuna.checkpoint.values import Json, PartRecord


def read_tensors(checkpoint: Checkpoint, names: Iterable[str]) -> dict[str, Tensor]:
    """CPU tensors with memory of their own.

    Args:
        checkpoint: where.
        names: as in ``names``; each is in ``checkpoint.places``.

    Raises:
        DamagedCheckpoint: a file is missing, cut short or changed; the message has file, expected and found.
        CheckpointError: there is no tensor of that name, or the store fails.
    """
    names = list(dict.fromkeys(names))
    missing = [name for name in names if name not in checkpoint.places]
    if missing:
        raise CheckpointError(
            f"The checkpoint {checkpoint.store.url}/{checkpoint.directory} has no {listed(missing)}."
        )
    by_part: dict[str, list[Place]] = {}
    for name in names:
        place = checkpoint.places[name]
        by_part.setdefault(place.part.file, []).append(place)
    read: dict[str, Tensor] = {}
    for places in by_part.values():
        read.update(_read_part(checkpoint, places[0].part, places))
    return {name: read[name] for name in names}


def read_state(checkpoint: Checkpoint, stored: Json, where: str) -> Any:
    """State that ``collect.encode_state`` took apart, put together.

    Raises:
        DamagedCheckpoint, CheckpointError: see ``read_tensors``.
    """
    return unflatten(stored, read_tensors(checkpoint, tensor_names(stored)), where)


def _read_part(checkpoint: Checkpoint, part: PartRecord, places: list[Place]) -> Mapping[str, Tensor]:
    places = sorted(places, key=lambda place: place.tensor.begin)
    made = {place.tensor.name: _empty(place) for place in places}
    spans = [
        Span(begin=place.tensor.begin, into=_memory_of(made[place.tensor.name]))
        for place in places
        if place.tensor.end > place.tensor.begin
    ]
    url = checkpoint.url_of(part.file)
    try:
        checkpoint.store.read_into(checkpoint.path_of(part.file), spans)
    except FileNotFoundError as error:
        raise DamagedCheckpoint(
            f"{url}: expected {part.size_bytes} bytes, found no such file. Restore it, or use another "
            f"checkpoint."
        ) from error
    except EOFError as error:
        raise DamagedCheckpoint(
            f"{url}: expected {part.size_bytes} bytes, found that it ends at byte {error}. It was cut short; "
            f"use another checkpoint."
        ) from error
    except OSError as error:
        if error.errno == errno.EIO:
            raise DamagedCheckpoint(f"{url}: the disk cannot read it ({error}).") from error
        raise CheckpointError(f"Cannot read {url}: {error}.") from error
    for place in places:
        _check(url, place, made[place.tensor.name])
    return made


def _check(url: str, place: Place, tensor: Tensor) -> None:
    found = zlib.crc32(_memory_of(tensor)) if tensor.nbytes else 0
    if found != place.tensor.crc32:
        raise DamagedCheckpoint(
            f"{url}: {place.tensor.name} (bytes {place.tensor.begin} to {place.tensor.end}): expected crc32 "
            f"{place.tensor.crc32:08x}, found {found:08x}. The file was changed; use another checkpoint."
        )


def _empty(place: Place) -> Tensor:
    flat = torch.empty(place.tensor.end - place.tensor.begin, dtype=torch.uint8)
    return flat.view(getattr(torch, place.tensor.dtype)).view(place.tensor.shape)


def _memory_of(tensor: Tensor) -> memoryview:
    """The bytes of a dense CPU tensor, not copied."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data
