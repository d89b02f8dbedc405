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
from varuna.run.wire import (
    PREFIX_BYTES,
    FrameKind,
    Message,
    MessageHeader,
    allocate,
    decode_header,
    decode_prefix,
    encode_goodbye,
    encode_message,
    payload_views,
)

_READ_AHEAD_BYTES = 16 << 10
_MAX_VECTORS = 1024  # IOV_MAX of Linux


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


def message_frame(header: MessageHeader, message: Message) -> Frame:
    """A frame for ``message`` and the header that ``header_of`` made for it.

    CPU tensors are sent from their own memory when contiguous. CUDA tensors start a copy to pinned memory on
    the current stream, and ``Frame.ready`` says when it is done: this never waits for the device.
    """
    tensors = [None if value is None else _on_host(value) for value in message.values]
    views = payload_views(tensors)
    payload_bytes = sum([view.nbytes for view in views])
    head = encode_message(header, payload_bytes)
    return Frame((head, *views), len(head) + payload_bytes, tensors, _copies_done(message.values))


def goodbye_frame(reason: str) -> Frame:
    """The last frame of a channel."""
    data = encode_goodbye(reason)
    return Frame((data,), len(data))


def _on_host(tensor: Tensor) -> Tensor:
    """The same values, dense, in CPU memory; the tensor itself if it is that already."""
    if tensor.is_cpu and tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
        return tensor
    tensor = tensor.detach().resolve_conj().resolve_neg()
    if tensor.is_cuda:
        host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
    return tensor.cpu().contiguous()


def _copies_done(values: Sequence[Tensor | None]) -> torch.cuda.Event | None:
    device = next((value.device for value in values if value is not None and value.is_cuda), None)
    if device is None:
        return None
    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record(torch.cuda.current_stream(device))
    return event


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

    Args:
        stream: a connected, blocking socket.
        pin_memory: receive into pinned memory, so that the copy to a GPU need not wait.
    """

    def __init__(self, stream: socket.socket, *, pin_memory: bool = False) -> None:
        self._stream = stream
        self._pin_memory = pin_memory
        self._buffer = memoryview(bytearray(_READ_AHEAD_BYTES))
        self._start = 0
        self._end = 0

    def read(self) -> Arrival | Goodbye:
        """The next frame. ``EOFError`` or ``OSError`` when the stream ended, ``ProtocolError`` if damaged."""
        self._read_ahead(PREFIX_BYTES)
        prefix = decode_prefix(self._take(PREFIX_BYTES))
        if prefix.header_bytes <= _READ_AHEAD_BYTES:
            self._read_ahead(prefix.header_bytes)
            head = self._take(prefix.header_bytes)
        else:
            head = memoryview(bytearray(prefix.header_bytes))
            self._read_into([head])
        if prefix.kind is FrameKind.GOODBYE:
            return Goodbye(str(head, "utf-8", "replace"))
        header = decode_header(head, prefix.payload_bytes)
        values = allocate(header.tensors, pin_memory=self._pin_memory)
        self._read_into(payload_views(values))
        return Arrival(header, values)

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
