"""What travels between neighbouring stages, as bytes: one frame per message.

A frame is a fixed prefix, a layout, and the bytes of the tensors one after the other::

    magic "VRNA" | version u8 | kind u8 | 2 pad | generation i64 | step i64 | micro-batch i64
                 | layout bytes u32 | payload bytes u64                                        (big-endian)
    layout: msgpack of ``Layout`` (kind MESSAGE) or UTF-8 text (kind GOODBYE)
    payload: tensor 0, tensor 1, ... dense, row-major, little-endian

Nothing here touches a socket. What is read is checked against limits before memory is taken for it. Prefix and
layout are apart because the layout is nearly always one seen before, and both ends remember those: after a wait
Python runs from cold caches, ten to thirty times slower than in a loop, and the next stage waits meanwhile.
"""

from __future__ import annotations

import enum
import struct
from dataclasses import dataclass

import msgspec
import torch
from torch import Tensor

from varuna.errors import ProtocolError
from varuna.run.tensor_bytes import DTYPES, TensorInfo, info_of

WIRE_VERSION = 1
MAX_LAYOUT_BYTES = 16 << 20
MAX_PAYLOAD_BYTES = 1 << 38
MAX_TENSORS = 4096
MAX_DIMENSIONS = 64
MAX_REMEMBERED = 64
MAX_REMEMBERED_BYTES = 4096

_MAGIC = b"VRNA"
_PREFIX = struct.Struct("!4sBBxxqqqIQ")
PREFIX_BYTES = _PREFIX.size

_LayoutKey = tuple[str, "Direction", tuple[tuple[torch.dtype, torch.Size] | None, ...]]


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


class MessageHeader(msgspec.Struct, frozen=True, kw_only=True):
    """What a message is for: the receiver checks it before it uses the tensors.

    Attributes:
        generation: membership and plan it belongs to.
        step_index: optimizer step (training) or evaluation pass.
        micro_batch_index: k in the global batch, the same number on every stage.
        operation: "train" or "evaluate".
        direction: activation or gradient.
    """

    generation: int
    step_index: int
    micro_batch_index: int
    operation: str
    direction: Direction

    def __str__(self) -> str:
        return (
            f"{self.operation} {self.direction.value} of micro-batch {self.micro_batch_index}, "
            f"step {self.step_index}, generation {self.generation}"
        )


class Layout(msgspec.Struct, frozen=True, array_like=True):
    """What messages of one kind have in common; ``tensors`` says None for "no tensor"."""

    operation: str
    direction: Direction
    signature: str
    tensors: tuple[TensorInfo | None, ...]

    @property
    def payload_bytes(self) -> int:
        """Size of all tensors."""
        return sum([info.num_bytes for info in self.tensors if info is not None])


class FramePrefix(msgspec.Struct, frozen=True):
    """The fixed start of a frame, checked."""

    kind: int
    generation: int
    step_index: int
    micro_batch_index: int
    layout_bytes: int
    payload_bytes: int

    def header(self, layout: Layout) -> MessageHeader:
        """What the message is for."""
        return MessageHeader(
            generation=self.generation,
            step_index=self.step_index,
            micro_batch_index=self.micro_batch_index,
            operation=layout.operation,
            direction=layout.direction,
        )


class Encoder:
    """Writes the part of a message before its tensors; remembers layouts."""

    def __init__(self) -> None:
        self._known: dict[_LayoutKey, tuple[bytes, int]] = {}

    def encode(self, header: MessageHeader, message: Message) -> tuple[bytes, int]:
        """Prefix and layout of a message, and how many bytes of tensors follow.

        Raises:
            ProtocolError: a tensor that cannot travel, or a message over the limits.
        """
        if message.signature:
            layout, payload_bytes = _encode_layout(header, message)
        else:
            types = [None if value is None else (value.dtype, value.shape) for value in message.values]
            key = (header.operation, header.direction, tuple(types))
            known = self._known.get(key)
            if known is None:
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                known = self._known[key] = _encode_layout(header, message)
            layout, payload_bytes = known
        prefix = _PREFIX.pack(
            _MAGIC,
            WIRE_VERSION,
            FrameKind.MESSAGE,
            header.generation,
            header.step_index,
            header.micro_batch_index,
            len(layout),
            payload_bytes,
        )
        return prefix + layout, payload_bytes


_encode_msgpack = msgspec.msgpack.Encoder().encode
_decode_msgpack = msgspec.msgpack.Decoder(Layout).decode


def _encode_layout(header: MessageHeader, message: Message) -> tuple[bytes, int]:
    layout = Layout(
        header.operation,
        header.direction,
        message.signature,
        tuple([None if value is None else info_of(value) for value in message.values]),
    )
    data, payload_bytes = _encode_msgpack(layout), layout.payload_bytes
    if len(data) > MAX_LAYOUT_BYTES or payload_bytes > MAX_PAYLOAD_BYTES or len(layout.tensors) > MAX_TENSORS:
        raise ProtocolError(
            f"A message of {len(layout.tensors)} tensors, {payload_bytes} bytes and a layout of {len(data)} is "
            f"over the limits of {MAX_TENSORS}, {MAX_PAYLOAD_BYTES} and {MAX_LAYOUT_BYTES}. Use smaller "
            f"micro-batches or another cut point."
        )
    return data, payload_bytes


def encode_goodbye(reason: str) -> bytes:
    """A whole frame that says nothing more will follow, and why ("" for the ordinary end)."""
    text = reason.encode(errors="replace")[:MAX_LAYOUT_BYTES]
    return _PREFIX.pack(_MAGIC, WIRE_VERSION, FrameKind.GOODBYE, 0, 0, 0, len(text), 0) + text


def decode_prefix(data: bytes | bytearray | memoryview) -> FramePrefix:
    """Read ``PREFIX_BYTES`` bytes; ``ProtocolError`` if another program or version wrote them."""
    magic, version, kind, generation, step_index, k, layout_bytes, payload_bytes = _PREFIX.unpack(data)
    if magic != _MAGIC or version != WIRE_VERSION:
        raise ProtocolError(
            f"Expected a Varuna message of version {WIRE_VERSION}, got magic {magic!r} version {version}. "
            f"All workers must run the same version of Varuna."
        )
    if kind not in (FrameKind.MESSAGE, FrameKind.GOODBYE):
        raise ProtocolError(f"Unknown kind of message {kind}. All workers must run the same version of Varuna.")
    if layout_bytes > MAX_LAYOUT_BYTES or payload_bytes > MAX_PAYLOAD_BYTES:
        raise ProtocolError(
            f"A message states {layout_bytes} bytes of layout and {payload_bytes} of tensors, over the limits "
            f"of {MAX_LAYOUT_BYTES} and {MAX_PAYLOAD_BYTES}: the stream is damaged."
        )
    return FramePrefix(kind, generation, step_index, k, layout_bytes, payload_bytes)


class Decoder:
    """Reads layouts; remembers those it has read and checked."""

    def __init__(self) -> None:
        self._known: dict[bytes, tuple[Layout, int]] = {}

    def decode(self, data: bytes, payload_bytes: int) -> Layout:
        """Read a layout and check that its tensors fill exactly ``payload_bytes``.

        Raises:
            ProtocolError: it does not, or is no layout.
        """
        known = self._known.get(data)
        if known is None:
            layout = _decode_layout(data)
            known = layout, layout.payload_bytes
            if len(data) <= MAX_REMEMBERED_BYTES:
                if len(self._known) >= MAX_REMEMBERED:
                    self._known.clear()
                self._known[data] = known
        layout, stated_bytes = known
        if stated_bytes != payload_bytes:
            raise ProtocolError(
                f"The tensors of a message take {stated_bytes} bytes, but {payload_bytes} were announced: the "
                f"stream is damaged."
            )
        return layout


def _decode_layout(data: bytes) -> Layout:
    try:
        layout = _decode_msgpack(data)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProtocolError(f"A message layout of {len(data)} bytes cannot be read: {error}.") from error
    if len(layout.tensors) > MAX_TENSORS:
        raise ProtocolError(f"A message has {len(layout.tensors)} tensors, more than {MAX_TENSORS}.")
    for info in layout.tensors:
        if info is not None:
            _check_info(info)
    return layout


def _check_info(info: TensorInfo) -> None:
    if info.dtype not in DTYPES:
        raise ProtocolError(f"A message holds a tensor of type {info.dtype!r}, which this torch does not have.")
    if len(info.shape) > MAX_DIMENSIONS or any(size < 0 for size in info.shape):
        raise ProtocolError(f"A message holds a tensor of impossible shape {info.shape}.")
