"""Whole frames over one socket: gather writes from tensor memory, scatter reads into it.

One system call moves a small message each way, and a large one waits inside the kernel (``MSG_WAITALL``), not
in Python, so that a busy interpreter does not slow the stream.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from varuna.run.mailbox import Arrival
from varuna.run.receive_memory import ReceiveMemory
from varuna.run.tensor_bytes import TensorInfo, copies_done, on_host, payload_views
from varuna.run.wire import (
    PREFIX_BYTES,
    Decoder,
    Encoder,
    FrameKind,
    Message,
    MessageHeader,
    decode_prefix,
    encode_goodbye,
)

_READ_AHEAD_BYTES = 16 << 10
_MAX_VECTORS = 1024  # IOV_MAX of Linux
_MAX_PREPARED_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Goodbye:
    """The peer will send nothing more; ``reason`` is "" for the ordinary end."""

    reason: str


@dataclass(frozen=True, slots=True, eq=False)
class Frame:
    """A message ready to be sent; it keeps the tensors alive.

    Attributes:
        buffers: what to write, in order.
        num_bytes: their sum.
        tensors: whose memory the buffers are.
        ready: CUDA event to wait for before the buffers may be read, or None.
    """

    buffers: tuple[bytes | memoryview, ...]
    num_bytes: int
    tensors: Sequence[Tensor | None] = ()
    ready: torch.cuda.Event | None = None


def message_frame(encoder: Encoder, header: MessageHeader, message: Message) -> Frame:
    """A frame for ``message``.

    CPU tensors are sent from their own memory when contiguous. CUDA tensors start a copy to pinned memory on
    the current stream, and ``Frame.ready`` says when it is done: this never waits for the device.
    """
    head, payload_bytes = encoder.encode(header, message)
    tensors = [None if value is None else on_host(value) for value in message.values]
    return Frame(
        (head, *payload_views(tensors)), len(head) + payload_bytes, tensors, copies_done(message.values)
    )


def goodbye_frame(reason: str) -> Frame:
    """The last frame of a channel."""
    data = encode_goodbye(reason)
    return Frame((data,), len(data))


def send_frame(stream: socket.socket, frame: Frame, *, already_sent: int = 0) -> None:
    """Write a whole frame, waiting as long as the stream is full. Raises ``OSError`` when it broke."""
    if frame.ready is not None:
        frame.ready.synchronize()
    buffers = _skip(frame.buffers, already_sent)
    while buffers:
        sent = stream.sendmsg(buffers[:_MAX_VECTORS])
        buffers = _skip(buffers, sent)


def try_send_frame(stream: socket.socket, frame: Frame) -> int:
    """Write what fits without waiting; bytes written. Raises ``OSError`` when the stream broke."""
    try:
        return stream.sendmsg(frame.buffers[:_MAX_VECTORS], (), socket.MSG_DONTWAIT)
    except BlockingIOError:
        return 0


def _skip(buffers: Sequence[bytes | memoryview], num_bytes: int) -> list[bytes | memoryview]:
    """What is left of ``buffers`` after the first ``num_bytes``."""
    for index, buffer in enumerate(buffers):
        size = len(buffer)
        if num_bytes < size:
            return [memoryview(buffer)[num_bytes:], *buffers[index + 1 :]]
        num_bytes -= size
    return []


class FrameReader:
    """Reads frames from a socket in order.

    While it waits it holds memory for one more message like the last one (if that was at most 1 MB): making
    tensors is slow just after a wait.

    Args:
        stream: a connected, blocking socket.
        pin_memory: receive into pinned memory, so that the copy to a GPU need not wait.
    """

    def __init__(self, stream: socket.socket, *, pin_memory: bool = False) -> None:
        self._stream = stream
        self._memory = ReceiveMemory(pin_memory=pin_memory)
        self._decoder = Decoder()
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = 0
        self._end = 0
        self._expected: tuple[TensorInfo | None, ...] = ()
        self._prepared: tuple[tuple[Tensor | None, ...], list[memoryview]] = ((), [])

    def read(self) -> Arrival | Goodbye:
        """The next frame. ``EOFError`` or ``OSError`` when the stream ended, ``ProtocolError`` if damaged."""
        self._prepared = self._prepare(self._expected)
        self._read_ahead(PREFIX_BYTES)
        prefix = decode_prefix(self._take(PREFIX_BYTES))
        data = self._read_bytes(prefix.layout_bytes)
        if prefix.kind == FrameKind.GOODBYE:
            return Goodbye(data.decode(errors="replace"))
        layout = self._decoder.decode(data, prefix.payload_bytes)
        if layout.tensors is not self._expected:
            self._prepared = self._prepare(layout.tensors)
            self._expected = layout.tensors if prefix.payload_bytes <= _MAX_PREPARED_BYTES else ()
        values, views = self._prepared
        self._prepared = ((), [])
        self._read_into(views)
        return Arrival(prefix.header(layout), Message(values=values, signature=layout.signature))

    def _prepare(
        self, infos: tuple[TensorInfo | None, ...]
    ) -> tuple[tuple[Tensor | None, ...], list[memoryview]]:
        values = self._memory.allocate(infos)
        return values, payload_views(values)

    def _read_bytes(self, num_bytes: int) -> bytes:
        if num_bytes <= _READ_AHEAD_BYTES:
            self._read_ahead(num_bytes)
            return bytes(self._take(num_bytes))
        data = bytearray(num_bytes)
        self._read_into([memoryview(data)])
        return bytes(data)

    def _take(self, num_bytes: int) -> memoryview:
        view = self._buffer[self._start : self._start + num_bytes]
        self._start += num_bytes
        return view

    def _read_ahead(self, num_bytes: int) -> None:
        """Have at least ``num_bytes`` unread in the buffer, and whatever else the kernel has ready."""
        unread = self._end - self._start
        if unread >= num_bytes:
            return
        if unread == 0 or self._start + num_bytes > _READ_AHEAD_BYTES:
            self._buffer[:unread] = bytes(self._buffer[self._start : self._end])
            self._start, self._end = 0, unread
        while self._end - self._start < num_bytes:
            self._end += _received(self._stream.recv_into(self._buffer[self._end :]))

    def _read_into(self, views: list[memoryview]) -> None:
        """Fill ``views`` from the buffer first, then straight from the socket."""
        for index, view in enumerate(views):
            num_bytes = min(len(view), self._end - self._start)
            view[:num_bytes] = self._take(num_bytes)
            if num_bytes < len(view):
                self._receive([view[num_bytes:], *views[index + 1 :]])
                return

    def _receive(self, views: Sequence[bytes | memoryview]) -> None:
        while views:
            batch = views[:_MAX_VECTORS]
            received, *_ = self._stream.recvmsg_into(batch, 0, socket.MSG_WAITALL)
            views = _skip(views, _received(received))


def _received(num_bytes: int) -> int:
    if num_bytes == 0:
        raise EOFError("the connection was closed")
    return num_bytes
