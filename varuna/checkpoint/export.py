"""A checkpoint's weights for other programs: one safetensors file, or a Hugging Face directory. Without torch.

Bytes are copied from the parts and checked on the way; no tensor is made, so it needs little memory.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint
from varuna.checkpoint.find import Checkpoint
from varuna.checkpoint.layout import ELEMENT_TYPES, FileLayout, TensorForm, lay_out
from varuna.checkpoint.manifest import Place
from varuna.checkpoint.store import Span
from varuna.errors import ConfigError

MAX_SHARD_BYTES = 5 * 10**9
"""Above this a Hugging Face directory has several files and an index, as transformers writes it."""

_METADATA = {"format": "pt"}  # transformers refuses files without it
_CHUNK_BYTES = 32 << 20
_WEIGHT_SUFFIXES = (
    ".safetensors", ".bin", ".pt", ".pth", ".ckpt", ".h5", ".msgpack", ".gguf", ".onnx", ".index.json",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class _Item:
    """A tensor under the name it is exported with."""

    name: str
    place: Place


def export_safetensors(checkpoint: Checkpoint, path: Path, *, prefix: str = "") -> int:
    """Write one file under the plain model's names; returns its size in bytes.

    Tied names are all there, with equal values, so that ``model.load_state_dict(load_file(path))`` is
    satisfied.

    Args:
        checkpoint: whose weights.
        path: the file; replaced whole if it exists.
        prefix: taken off every name.

    Raises:
        ConfigError: the path cannot be written, or a name lacks the prefix.
        DamagedCheckpoint, CheckpointError: the checkpoint cannot be read.
    """
    return _write_file(checkpoint, _items(checkpoint, prefix), path)


def export_huggingface(
    checkpoint: Checkpoint,
    directory: Path,
    *,
    source: Path | None = None,
    prefix: str = "",
    max_shard_bytes: int = MAX_SHARD_BYTES,
) -> tuple[str, ...]:
    """Write a directory that ``from_pretrained`` reads; returns the names of its files.

    Args:
        checkpoint: whose weights; of tied names only the first is written, as transformers does.
        directory: new or empty.
        source: a Hugging Face directory whose configuration and tokenizer files are copied (all but weights).
        prefix: taken off every name, for a model that the user wrapped in another.
        max_shard_bytes: of one weights file.

    Raises:
        ConfigError: the directory is not empty, cannot be written, or the source has no config.json.
        DamagedCheckpoint, CheckpointError: the checkpoint cannot be read.
    """
    if source is not None and not (source / "config.json").is_file():
        raise ConfigError(f"{source} has no config.json. Give the directory the model came from.")
    items = _without_ties(_items(checkpoint, prefix))
    shards = _shards(items, max_shard_bytes)
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if next(directory.iterdir(), None) is not None:
            raise ConfigError(f"{directory} is not empty. Give a new directory.")
        copied = _copy_companions(source, directory) if source is not None else []
    except OSError as error:
        raise ConfigError(f"Cannot write {directory}: {error}.") from error
    if len(shards) == 1:
        _write_file(checkpoint, shards[0], directory / "model.safetensors")
        return (*copied, "model.safetensors")
    names = [f"model-{number:05d}-of-{len(shards):05d}.safetensors" for number in range(1, len(shards) + 1)]
    for name, shard in zip(names, shards, strict=True):
        _write_file(checkpoint, shard, directory / name)
    index = {
        "metadata": {"total_size": sum(_size_bytes(item) for item in items)},
        "weight_map": {item.name: name for name, shard in zip(names, shards, strict=True) for item in shard},
    }
    _write(directory / "model.safetensors.index.json", [json.dumps(index, indent=2).encode()])
    return (*copied, *names, "model.safetensors.index.json")


# --- what goes where ------------------------------------------------------------------------


def _items(checkpoint: Checkpoint, prefix: str) -> list[_Item]:
    """Every name of the plain model's ``state_dict``, in its order."""
    items = []
    for name, stored in checkpoint.manifest.job.model_names.items():
        if not name.startswith(prefix):
            raise ConfigError(f"{name!r} does not begin with the prefix {prefix!r}; no name of it can be made.")
        place = checkpoint.places[stored]
        if ELEMENT_TYPES[place.tensor.dtype].extra:
            raise ConfigError(f"{name} is {place.tensor.dtype}, which a safetensors file cannot hold.")
        items.append(_Item(name=name.removeprefix(prefix), place=place))
    if not items:
        raise CheckpointError(f"{checkpoint.url} names no weights of a model.")
    return items


def _without_ties(items: Sequence[_Item]) -> list[_Item]:
    first: dict[str, _Item] = {}
    for item in items:
        first.setdefault(item.place.tensor.name, item)
    return list(first.values())


def _shards(items: Sequence[_Item], max_bytes: int) -> list[list[_Item]]:
    shards: list[list[_Item]] = [[]]
    size_bytes = 0
    for item in items:
        if shards[-1] and size_bytes + _size_bytes(item) > max_bytes:
            shards.append([])
            size_bytes = 0
        shards[-1].append(item)
        size_bytes += _size_bytes(item)
    return shards


def _size_bytes(item: _Item) -> int:
    return item.place.tensor.end - item.place.tensor.begin


def _copy_companions(source: Path, directory: Path) -> list[str]:
    """Everything a Hugging Face directory has beside weights."""
    copied = []
    for path in sorted(source.iterdir()):
        if path.is_file() and not path.name.startswith(".") and not path.name.endswith(_WEIGHT_SUFFIXES):
            shutil.copyfile(path, directory / path.name)
            copied.append(path.name)
    return copied


# --- bytes ----------------------------------------------------------------------------------


def _write_file(checkpoint: Checkpoint, items: Sequence[_Item], path: Path) -> int:
    by_name = {item.name: item for item in items}
    layout = lay_out(
        (
            TensorForm(name=item.name, dtype=item.place.tensor.dtype, shape=item.place.tensor.shape)
            for item in items
        ),
        _METADATA,
    )
    _write(path, _content(checkpoint, layout, by_name))
    return len(layout.header) + layout.payload_bytes


def _content(
    checkpoint: Checkpoint, layout: FileLayout, items: Mapping[str, _Item]
) -> Iterator[bytes | memoryview]:
    yield layout.header
    for placed in layout.tensors:
        yield from _tensor_bytes(checkpoint, items[placed.form.name].place)


def _tensor_bytes(checkpoint: Checkpoint, place: Place) -> Iterator[memoryview]:
    tensor, file = place.tensor, place.part.file
    found = 0
    memory = memoryview(bytearray(min(_CHUNK_BYTES, tensor.end - tensor.begin)))
    for start in range(tensor.begin, tensor.end, _CHUNK_BYTES):
        chunk = memory[: min(_CHUNK_BYTES, tensor.end - start)]
        try:
            checkpoint.store.read_into(checkpoint.path_of(file), [Span(begin=start, into=chunk)])
        except (FileNotFoundError, EOFError) as error:
            raise DamagedCheckpoint(
                f"{checkpoint.url_of(file)}: expected {place.part.size_bytes} bytes, found that it is missing "
                f"or cut short ({error!r})."
            ) from error
        except OSError as error:
            raise CheckpointError(f"Cannot read {checkpoint.url_of(file)}: {error}.") from error
        found = zlib.crc32(chunk, found)
        yield chunk
    if found != tensor.crc32:
        raise DamagedCheckpoint(
            f"{checkpoint.url_of(file)}: {tensor.name}: expected crc32 {tensor.crc32:08x}, found {found:08x}. "
            f"The file was changed; export another checkpoint."
        )


def _write(path: Path, chunks: Iterator[bytes | memoryview] | list[bytes]) -> None:
    """Nobody ever sees half of the file."""
    unfinished = path.with_name(f".{path.name}.{uuid.uuid4().hex[:8]}")
    try:
        try:
            with open(unfinished, "wb") as file:
                for chunk in chunks:
                    file.write(chunk)
            os.replace(unfinished, path)
        finally:
            unfinished.unlink(missing_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot write {path}: {error}.") from error
