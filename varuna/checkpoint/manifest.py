"""The manifest: assembled from what the workers wrote, and to and from bytes. Pure.

On disk it is ``{"format": 1, "crc32": ..., "manifest": {...}}``: the checksum is of the bytes of the inner
object, so that a changed step or learning rate is found as surely as a changed weight.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable
from dataclasses import dataclass

import msgspec

from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint
from varuna.checkpoint.values import (
    FORMAT,
    JobState,
    Manifest,
    PartRecord,
    SaveOrder,
    StoredTensor,
    Written,
)

MANIFEST_FILE = "manifest.json"
_MAX_LISTED = 8


@dataclass(frozen=True, kw_only=True)
class Place:
    """A tensor and the part that holds it."""

    part: PartRecord
    tensor: StoredTensor


class _Envelope(msgspec.Struct, kw_only=True):
    format: int
    crc32: int
    manifest: msgspec.Raw


def assemble(
    order: SaveOrder,
    job: JobState,
    written: Iterable[Written],
    *,
    required: Iterable[str],
    num_sections: int,
    saved_at: str,
    version: str,
) -> Manifest:
    """The manifest of a save whose parts are all in.

    Args:
        order: the save.
        job: what is the same on every worker.
        written: every worker's answer, in any order; a tensor that two wrote (after a death) is taken once.
        required: names of tensors that must be there: at least every parameter.
        num_sections: of the model.
        saved_at: the time in UTC, for people.
        version: of Varuna.

    Raises:
        CheckpointError: a tensor is missing, an answer is of another save, or two differ about one tensor.
    """
    parts: dict[str, PartRecord] = {}
    for answer in written:
        if answer.save_id != order.save_id:
            raise CheckpointError(
                f"Worker {answer.worker} answered for save {answer.save_id}; this is save {order.save_id} of "
                f"step {order.step}. Its files are left out."
            )
        parts.update({part.file: part for part in answer.parts})
    manifest = Manifest(
        order=order,
        job=job,
        parts=tuple(sorted(parts.values(), key=lambda part: (part.section_index, part.file))),
        num_sections=num_sections,
        saved_at=saved_at,
        version=version,
    )
    places = places_of(manifest)
    missing = sorted({*required, *job.model_names.values()} - set(places))
    if missing:
        raise CheckpointError(
            f"Save {order.save_id} of step {order.step} lacks {len(missing)} tensors ({listed(missing)}): no "
            f"worker wrote them."
        )
    return manifest


def places_of(manifest: Manifest) -> dict[str, Place]:
    """Every tensor by name; the first part that holds it counts.

    Raises:
        CheckpointError: two parts differ about shape or dtype.
    """
    places: dict[str, Place] = {}
    for part in manifest.parts:
        for tensor in part.tensors:
            first = places.setdefault(tensor.name, Place(part=part, tensor=tensor)).tensor
            if (first.dtype, first.shape) != (tensor.dtype, tensor.shape):
                raise CheckpointError(
                    f"{tensor.name} is {first.dtype}{list(first.shape)} in one part and "
                    f"{tensor.dtype}{list(tensor.shape)} in {part.file}."
                )
    return places


def values_of(manifest: Manifest) -> dict[str, object]:
    """Optimizer state that is not a tensor, by name, as ``tree`` encodes it."""
    values: dict[str, object] = {}
    for part in reversed(manifest.parts):
        values.update(part.values)
    return values


def encode_manifest(manifest: Manifest) -> bytes:
    """The bytes of the file: the same for the same manifest."""
    inner = msgspec.json.encode(manifest)
    return msgspec.json.encode(_Envelope(format=FORMAT, crc32=zlib.crc32(inner), manifest=msgspec.Raw(inner)))


def decode_manifest(data: bytes, path: str) -> Manifest:
    """What ``encode_manifest`` wrote.

    Args:
        data: the file.
        path: for the message.

    Raises:
        DamagedCheckpoint: it was cut short or changed.
        CheckpointError: it is of another format.
    """
    try:
        envelope = msgspec.json.decode(data, type=_Envelope)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise DamagedCheckpoint(
            f"{path}: expected a manifest, found {len(data)} bytes that are none ({error}). It was cut "
            f"short or changed; use another checkpoint."
        ) from error
    if envelope.format != FORMAT:
        raise CheckpointError(
            f"{path} has format {envelope.format}; this Varuna reads {FORMAT}. Use the Varuna that wrote it."
        )
    inner = bytes(envelope.manifest)
    found = zlib.crc32(inner)
    if found != envelope.crc32:
        raise DamagedCheckpoint(
            f"{path}: expected crc32 {envelope.crc32:08x}, found {found:08x}: the manifest was changed. Use "
            f"another checkpoint."
        )
    try:
        return msgspec.json.decode(inner, type=Manifest)
    except msgspec.DecodeError as error:
        raise DamagedCheckpoint(f"{path}: {error}. It was written by a program with an error.") from error


def listed(names: Iterable[str]) -> str:
    """A few names for a message, and how many more."""
    names = list(names)
    more = f" and {len(names) - _MAX_LISTED} more" if len(names) > _MAX_LISTED else ""
    return ", ".join(names[:_MAX_LISTED]) + more
