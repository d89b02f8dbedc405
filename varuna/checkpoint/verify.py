"""Read a whole checkpoint and say what is broken. Without torch, in little memory."""

from __future__ import annotations

import zlib
from collections.abc import Iterator

from varuna.checkpoint.find import Checkpoint
from varuna.checkpoint.layout import DTYPE_OF_CODE, ELEMENT_TYPES, TensorForm, parse_header
from varuna.checkpoint.store import Span
from varuna.checkpoint.values import PartRecord, StoredTensor

_CHUNK_BYTES = 32 << 20


def problems_of(checkpoint: Checkpoint) -> Iterator[str]:
    """A line for everything that is wrong: file, what was expected, what was found. None if all is well."""
    for part in checkpoint.manifest.parts:
        url = checkpoint.url_of(part.file)
        try:
            size_bytes = checkpoint.store.size_of(checkpoint.path_of(part.file))
            if size_bytes != part.size_bytes:
                yield f"{url}: expected {part.size_bytes} bytes, found {size_bytes}"
                continue
            yield from (f"{url}: {problem}" for problem in _part_problems(checkpoint, part))
        except FileNotFoundError:
            yield f"{url}: expected {part.size_bytes} bytes, found no such file"
        except (OSError, EOFError) as error:
            yield f"{url}: cannot be read: {error}"


def checksum(checkpoint: Checkpoint, file: str, begin: int, end: int) -> int:
    """crc32 of bytes of a part.

    Raises:
        OSError, EOFError: it cannot be read, or is too short.
    """
    found = 0
    memory = bytearray(min(_CHUNK_BYTES, end - begin))
    for start in range(begin, end, _CHUNK_BYTES):
        view = memoryview(memory)[: min(_CHUNK_BYTES, end - start)]
        checkpoint.store.read_into(checkpoint.path_of(file), [Span(begin=start, into=view)])
        found = zlib.crc32(view, found)
    return found


def _part_problems(checkpoint: Checkpoint, part: PartRecord) -> Iterator[str]:
    header = checkpoint.store.read(checkpoint.path_of(part.file), 0, part.header_bytes)
    found = zlib.crc32(header)
    if found != part.header_crc32:
        yield f"header: expected crc32 {part.header_crc32:08x}, found {found:08x}"
    else:
        yield from _header_problems(header, part)
    for tensor in part.tensors:
        found = checksum(checkpoint, part.file, tensor.begin, tensor.end)
        if found != tensor.crc32:
            yield f"{tensor.name}: expected crc32 {tensor.crc32:08x}, found {found:08x}"


def _header_problems(header: bytes, part: PartRecord) -> Iterator[str]:
    """The file's own header says what the manifest says, so that other programs read the same."""
    found = {item.form.name: (item.form, item.begin, item.end) for item in parse_header(header)}
    expected = {tensor.name: _in_header(tensor, part) for tensor in part.tensors}
    for name in sorted(found.keys() | expected.keys()):
        if found.get(name) != expected.get(name):
            yield f"{name}: the manifest says {expected.get(name)}, the file's header {found.get(name)}"


def _in_header(tensor: StoredTensor, part: PartRecord) -> tuple[TensorForm, int, int]:
    element = ELEMENT_TYPES[tensor.dtype]
    shape = (*tensor.shape, element.extra) if element.extra else tensor.shape
    form = TensorForm(name=tensor.name, dtype=DTYPE_OF_CODE[element.code], shape=shape)
    return form, tensor.begin - part.header_bytes, tensor.end - part.header_bytes
