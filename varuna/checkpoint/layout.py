"""The bytes of a safetensors file: where each tensor lies, and the header that says so. Pure, without torch.

The library writes whole files from bytes that it copies; here the payload lies ready in a snapshot, goes to any
store, and must be synced before it counts, so the header is made here. It is 8 bytes of length, then JSON (see
https://github.com/huggingface/safetensors#format). Tensors are laid out by size of element, largest first, so
that each is aligned.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from varuna.checkpoint.errors import StateError

_ALIGNMENT = 8
_CACHE_LINE_BYTES = 64
_LENGTH = struct.Struct("<Q")
MAX_HEADER_BYTES = 100_000_000
"""Longest header that readers of the format accept."""


@dataclass(frozen=True, kw_only=True)
class ElementType:
    """How elements of a torch dtype are written.

    Attributes:
        code: the format's name.
        size_bytes: of one torch element.
        extra: size of a last dimension that is added because the format has no such type; 0 for none.
    """

    code: str
    size_bytes: int
    extra: int = 0


ELEMENT_TYPES = {
    "bool": ElementType(code="BOOL", size_bytes=1),
    "uint8": ElementType(code="U8", size_bytes=1),
    "int8": ElementType(code="I8", size_bytes=1),
    "uint16": ElementType(code="U16", size_bytes=2),
    "int16": ElementType(code="I16", size_bytes=2),
    "uint32": ElementType(code="U32", size_bytes=4),
    "int32": ElementType(code="I32", size_bytes=4),
    "uint64": ElementType(code="U64", size_bytes=8),
    "int64": ElementType(code="I64", size_bytes=8),
    "float16": ElementType(code="F16", size_bytes=2),
    "bfloat16": ElementType(code="BF16", size_bytes=2),
    "float32": ElementType(code="F32", size_bytes=4),
    "float64": ElementType(code="F64", size_bytes=8),
    "complex64": ElementType(code="C64", size_bytes=8),
    "float8_e4m3fn": ElementType(code="F8_E4M3", size_bytes=1),
    "float8_e5m2": ElementType(code="F8_E5M2", size_bytes=1),
    "float8_e4m3fnuz": ElementType(code="F8_E4M3FNUZ", size_bytes=1),
    "float8_e5m2fnuz": ElementType(code="F8_E5M2FNUZ", size_bytes=1),
    "complex32": ElementType(code="F16", size_bytes=4, extra=2),
    "complex128": ElementType(code="F64", size_bytes=16, extra=2),
}
"""By ``torch.<dtype>``. Complex types that the format lacks get a last dimension of real and imaginary part."""

DTYPE_OF_CODE = {element.code: dtype for dtype, element in ELEMENT_TYPES.items() if not element.extra}
"""torch's name for each of the format's types."""


@dataclass(frozen=True, kw_only=True)
class TensorForm:
    """A tensor without its values; ``dtype`` as in ``torch.<dtype>``."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Of its elements, densely."""
        return math.prod(self.shape) * element_type(self).size_bytes


@dataclass(frozen=True, kw_only=True)
class PlacedTensor:
    """A tensor and its bytes in the payload: ``begin <= i < end``, counted from the end of the header."""

    form: TensorForm
    begin: int
    end: int


@dataclass(frozen=True, kw_only=True)
class FileLayout:
    """A whole file before its payload is written."""

    header: bytes
    tensors: tuple[PlacedTensor, ...]
    payload_bytes: int


def element_type(form: TensorForm) -> ElementType:
    """How its elements are written.

    Raises:
        StateError: the format has no way to hold them.
    """
    found = ELEMENT_TYPES.get(form.dtype)
    if found is None:
        raise StateError(
            f"{form.name} has dtype {form.dtype}, which a checkpoint cannot hold. It holds "
            f"{', '.join(ELEMENT_TYPES)}."
        )
    return found


def place(forms: Iterable[TensorForm]) -> tuple[PlacedTensor, ...]:
    """Where each tensor lies in the payload: no gaps, every one aligned to its elements.

    Those of odd sizes (counters, say) come last, so that large ones start at cache lines, which copies faster.
    """
    ordered = sorted(
        forms,
        key=lambda form: (
            -element_type(form).size_bytes,
            form.size_bytes % _CACHE_LINE_BYTES != 0,
            form.name,
        ),
    )
    placed = []
    position = 0
    for form in ordered:
        placed.append(PlacedTensor(form=form, begin=position, end=position + form.size_bytes))
        position += form.size_bytes
    return tuple(placed)


def lay_out(forms: Iterable[TensorForm], metadata: dict[str, str] | None = None) -> FileLayout:
    """A file that holds these tensors.

    Raises:
        StateError: a dtype the format cannot hold, or so many tensors that readers refuse the header.
    """
    placed = place(forms)
    entries: dict[str, object] = {"__metadata__": metadata} if metadata else {}
    for item in placed:
        element = element_type(item.form)
        shape = [*item.form.shape, element.extra] if element.extra else list(item.form.shape)
        entries[item.form.name] = {
            "dtype": element.code,
            "shape": shape,
            "data_offsets": [item.begin, item.end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % _ALIGNMENT)
    if len(text) > MAX_HEADER_BYTES:
        raise StateError(
            f"{len(placed)} tensors need a header of {len(text)} bytes in one file; readers accept "
            f"{MAX_HEADER_BYTES}. Divide the model into more sections."
        )
    return FileLayout(
        header=_LENGTH.pack(len(text)) + text,
        tensors=placed,
        payload_bytes=placed[-1].end if placed else 0,
    )


def header_size(start: bytes) -> int:
    """Bytes before the payload, from the first 8 of a file.

    Raises:
        ValueError: it is no safetensors file.
    """
    if len(start) < _LENGTH.size:
        raise ValueError(f"{len(start)} bytes are too few for a safetensors file")
    (length,) = _LENGTH.unpack(start[: _LENGTH.size])
    if length > MAX_HEADER_BYTES:
        raise ValueError(f"a header of {length} bytes is none of a safetensors file")
    return int(length) + _LENGTH.size


def parse_header(header: bytes) -> tuple[PlacedTensor, ...]:
    """The tensors that a file's header (length included) names, in the file's order.

    Raises:
        ValueError: it is not a header, or names a type that torch lacks.
    """
    entries = json.loads(header[_LENGTH.size :])
    if not isinstance(entries, dict):
        raise ValueError("the header is not a JSON object")
    return tuple(
        sorted(
            (_placed(name, entry) for name, entry in entries.items() if name != "__metadata__"),
            key=lambda item: item.begin,
        )
    )


def _placed(name: str, entry: object) -> PlacedTensor:
    if not isinstance(entry, dict) or {"dtype", "shape", "data_offsets"} - set(entry):
        raise ValueError(f"the header's entry for {name} is damaged")
    if entry["dtype"] not in DTYPE_OF_CODE:
        raise ValueError(f"{name} has type {entry['dtype']}, which is not supported")
    shape, offsets = entry["shape"], entry["data_offsets"]
    if not (_are_counts(shape) and _are_counts(offsets) and len(offsets) == 2):
        raise ValueError(f"the header's entry for {name} is damaged")
    form = TensorForm(name=name, dtype=DTYPE_OF_CODE[entry["dtype"]], shape=tuple(shape))
    begin, end = offsets
    if end - begin != form.size_bytes:
        raise ValueError(f"{name} has {end - begin} bytes where its shape needs {form.size_bytes}")
    return PlacedTensor(form=form, begin=begin, end=end)


def _are_counts(value: object) -> bool:
    return isinstance(value, Sequence) and all(type(item) is int and item >= 0 for item in value)
