"""What travels between neighbouring stages, as bytes: one frame per message.

A frame is a fixed prefix, a header, and the bytes of the tensors one after the other::

    magic "VRNA" | version u8 | kind u8 | 2 pad | header bytes u32 | payload bytes u64      (big-endian)
    header: msgpack of ``MessageHeader`` (kind MESSAGE) or UTF-8 text (kind GOODBYE)
    payload: tensor 0, tensor 1, ... dense, row-major, little-endian

Nothing here touches a socket. What is read is checked against limits before memory is taken for it.
Written for few Python steps per message: after a wait they run from cold caches, ten to thirty times slower than
in a loop, and the next stage waits for them.
"""

from __future__ import annotations

import ctypes
import enum
import math
import struct
import sys
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from varuna.errors import ProtocolError

WIRE_VERSION = 1
MAX_HEADER_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 1 << 38
MAX_TENSORS = 4096
MAX_DIMENSIONS = 64

_MAGIC = b"VRNA"
_PREFIX = struct.Struct("!4sBBxxIQ")
PREFIX_BYTES = _PREFIX.size

_DTYPE_NAMES = (
    *("bool", "uint8", "uint16", "uint32", "uint64", "int8", "int16", "int32", "int64"),
    *("float16", "bfloat16", "float32", "float64", "complex32", "complex64", "complex128"),
    *(
        "float8_e4m3fn",
        "float8_e4m3fnuz",
        "float8_e5m2",
        "float8_e5m2fnuz",
        "float8_e8m0fnu",
        "float4_e2m1fn_x2",
    ),
)
DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in _DTYPE_NAMES if hasattr(torch, name)}
_NAME_OF_DTYPE = {dtype: name for name, dtype in DTYPES.items()}


class Direction(enum.Enum):
    """Which way a message flows: activations from the first stage to the last, gradients back."""

    ACTIVATION = "activation"
    GRADIENT = "gradient"


class FrameKind(enum.IntEnum):
    """What a frame carries."""

    MESSAGE = 1
    GOODBYE = 2


@dataclass(frozen=True, kw_only=True)
class Message:
    """What one stage hands to its neighbour for one micro-batch.

    Attributes:
        values: tensors in the order of the values at the cut; None where there is none (a gradient may be
            missing). Whoever sends a message must not change its tensors afterwards: they are read later.
        signature: JSON text of the input signature if it is new to the receiver, else "".
    """

    values: tuple[Tensor | None, ...]
    signature: str = ""


class TensorInfo(msgspec.Struct, frozen=True, array_like=True):
    """Type and shape of one tensor of a message; ``dtype`` as in ``torch.<dtype>``."""

    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of its dense payload."""
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


class MessageHeader(msgspec.Struct, frozen=True, kw_only=True, array_like=True):
    """What a message is: checked by the receiver before its tensors are used.

    Attributes:
        generation: membership and plan it belongs to.
        step_index: optimizer step (training) or evaluation pass.
        micro_batch_index: k in the global batch, the same number on every stage.
        operation: "train" or "evaluate".
        direction: activation or gradient.
        signature: JSON text of a new input signature, or "".
        tensors: type and shape of each tensor; None for "no tensor".
    """

    generation: int
    step_index: int
    micro_batch_index: int
    operation: str
    direction: Direction
    signature: str = ""
    tensors: tuple[TensorInfo | None, ...] = ()

    @property
    def place(self) -> tuple[int, int, int, str, Direction]:
        """What sender and receiver must agree on."""
        return (
            self.generation,
            self.step_index,
            self.micro_batch_index,
            self.operation,
            self.direction,
        )

    def __str__(self) -> str:
        return (
            f"{self.operation} {self.direction.value} of micro-batch {self.micro_batch_index}, "
            f"step {self.step_index}, generation {self.generation}"
        )


@dataclass(frozen=True, slots=True)
class FramePrefix:
    """The fixed start of a frame, checked."""

    kind: FrameKind
    header_bytes: int
    payload_bytes: int


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(MessageHeader).decode


def info_of(tensor: Tensor) -> TensorInfo:
    """Type and shape as they travel; ``ProtocolError`` for a tensor that cannot."""
    name = _NAME_OF_DTYPE.get(tensor.dtype)
    if name is None or tensor.layout is not torch.strided or tensor.is_meta:
        raise ProtocolError(
            f"A tensor of {tensor.dtype}, layout {tensor.layout}, device {tensor.device} cannot be sent to the "
            f"next stage. Move the cut point so that a dense tensor crosses it."
        )
    return TensorInfo(name, tuple(tensor.shape))


def header_of(
    message: Message | None,
    *,
    generation: int,
    step_index: int,
    micro_batch_index: int,
    operation: str,
    direction: Direction,
) -> MessageHeader:
    """The header under which ``message`` travels (without tensors for None)."""
    values = message.values if message is not None else ()
    return MessageHeader(
        generation=generation,
        step_index=step_index,
        micro_batch_index=micro_batch_index,
        operation=operation,
        direction=direction,
        signature=message.signature if message is not None else "",
        tensors=tuple([None if value is None else info_of(value) for value in values]),
    )


def payload_views(tensors: Iterable[Tensor | None]) -> list[memoryview]:
    """The memory of contiguous CPU tensors in order, not copied, without those that have none.

    The views do not keep the tensors alive: the caller must, as long as it uses them.
    """
    return [_memory_of(tensor) for tensor in tensors if tensor is not None and tensor.nbytes]


def _memory_of(tensor: Tensor) -> memoryview:
    return memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())).cast("B")


def encode_message(header: MessageHeader, payload_bytes: int) -> bytes:
    """Prefix and header of a message whose tensors take ``payload_bytes``."""
    return _frame(FrameKind.MESSAGE, _encode(header), payload_bytes)


def encode_goodbye(reason: str) -> bytes:
    """A whole frame that says nothing more will follow, and why ("" for the ordinary end)."""
    return _frame(FrameKind.GOODBYE, reason.encode()[:MAX_HEADER_BYTES], 0)


def _frame(kind: FrameKind, header: bytes, payload_bytes: int) -> bytes:
    if len(header) > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"A message with a header of {len(header)} bytes and {payload_bytes} bytes of tensors is over the "
            f"limits of {MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES}. Use smaller micro-batches."
        )
    return _PREFIX.pack(_MAGIC, WIRE_VERSION, kind, len(header), payload_bytes) + header


def decode_prefix(data: bytes | bytearray | memoryview) -> FramePrefix:
    """Read ``PREFIX_BYTES`` bytes; ``ProtocolError`` if another program or version wrote them."""
    magic, version, kind, header_bytes, payload_bytes = _PREFIX.unpack(data)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise ProtocolError(
            f"Expected a Varuna message of version {WIRE_VERSION}, got magic {magic!r} version {version}. "
            f"All workers must run the same version of Varuna."
        )
    if kind not in (FrameKind.MESSAGE, FrameKind.GOODBYE):
        raise ProtocolError(f"Unknown kind of message {kind}. All workers must run the same version of Varuna.")
    if header_bytes > MAX_HEADER_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"A message states {header_bytes} bytes of header and {payload_bytes} of tensors, over the limits "
            f"of {MAX_HEADER_BYTES} and {MAX_PAYLOAD_BYTES}: the stream is damaged."
        )
    return FramePrefix(FrameKind(kind), header_bytes, payload_bytes)


def decode_header(data: bytes | bytearray | memoryview, payload_bytes: int) -> MessageHeader:
    """Read a header and check that its tensors fill exactly ``payload_bytes``."""
    try:
        header = _decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A message header of {len(data)} bytes cannot be read: {error}.") from error
    if len(header.tensors) > MAX_TENSORS:
        raise ProtocolError(f"A message has {len(header.tensors)} tensors, more than {MAX_TENSORS}.")
    stated_bytes = 0
    for info in header.tensors:
        if info is not None:
            _check_info(info)
            stated_bytes += info.num_bytes
    if stated_bytes != payload_bytes:
        raise ProtocolError(
            f"The tensors of {header} take {stated_bytes} bytes, but {payload_bytes} were announced: the "
            f"stream is damaged."
        )
    return header


def _check_info(info: TensorInfo) -> None:
    if info.dtype not in DTYPES:
        raise ProtocolError(f"A message holds a tensor of type {info.dtype!r}, which this torch does not have.")
    if len(info.shape) > MAX_DIMENSIONS or any(size < 0 for size in info.shape):
        raise ProtocolError(f"A message holds a tensor of impossible shape {info.shape}.")


def allocate(infos: Sequence[TensorInfo | None], *, pin_memory: bool = False) -> tuple[Tensor | None, ...]:
    """Uninitialised CPU tensors for a header's payload, each with its own storage."""
    return tuple(None if info is None else _empty(info, pin_memory) for info in infos)


def _empty(info: TensorInfo, pin_memory: bool) -> Tensor:
    dtype = DTYPES[info.dtype]
    if dtype is torch.complex32:  # torch warns that it is experimental when it makes one, not when it views one
        return (
            torch.empty(info.num_bytes, dtype=torch.uint8, pin_memory=pin_memory).view(dtype).view(info.shape)
        )
    return torch.empty(info.shape, dtype=dtype, pin_memory=pin_memory)


assert sys.byteorder == "little", "tensor bytes travel as they lie in memory"
