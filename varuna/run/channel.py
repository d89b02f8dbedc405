"""Channels between neighbouring stages: one TCP stream per neighbour and direction, one thread per stream.

Sending never waits for the neighbour: a small message goes straight into the kernel's buffer, the rest queues
for the channel's sender thread, which keeps the tensors alive until they are sent. A receiver thread puts what
arrives into the stage's ``Mailbox``. ``close`` says goodbye first, ``abort`` does not; both leave no thread and
no socket.

Why streams and not gloo's point-to-point: docs/adr/0005-transport.md.
"""

from __future__ import annotations

import socket
import threading
import time
from collections import deque

from torch.distributed import Store  # type: ignore[attr-defined]

from varuna.errors import PeerLost, RunError
from varuna.run.connect import ConnectOptions, Link, Links, Peer, StageAddress, connect_neighbours
from varuna.run.mailbox import Arrival, Mailbox
from varuna.run.stream import (
    Frame,
    FrameReader,
    goodbye_frame,
    message_frame,
    send_frame,
    try_send_frame,
)
from varuna.run.wire import Direction, Encoder, Message, MessageHeader

INLINE_BYTES = 256 << 10
"""Frames up to this size are written by the compute thread itself when the channel is idle."""

DEFAULT_MAX_UNREAD = 32
"""Messages per direction that a stage receives ahead of its compute."""


class SendChannel:
    """Outgoing messages of one direction to one neighbour, in order."""

    def __init__(self, link: Link, direction: Direction, mailbox: Mailbox) -> None:
        self.peer: Peer = link.peer
        self._stream = link.stream
        self._mailbox = mailbox
        self._encoder = Encoder()
        self._queue: deque[Frame] = deque()  # its head is the frame being sent
        self._head_sent = 0
        self._ending = False
        self._stopped = False
        self._error: RunError | None = None
        self._changed = threading.Condition()
        self._thread = threading.Thread(
            target=self._run, name=f"varuna-send-{direction.value}-{link.peer.rank}", daemon=True
        )
        self._thread.start()

    def send(self, header: MessageHeader, message: Message) -> None:
        """Send, without waiting for the neighbour; the message's tensors must not change afterwards.

        Raises:
            PeerLost: this or an earlier message could not be sent.
        """
        frame = message_frame(self._encoder, header, message)
        with self._changed:
            if self._stopped or self._error is not None:
                raise self._error or PeerLost(f"The connection to {self.peer} is closed.")
            sent = 0
            if not self._queue and frame.num_bytes <= INLINE_BYTES and frame.ready is None:
                sent = self._send_inline(frame)
                if sent == frame.num_bytes:
                    return
            if not self._queue:
                self._head_sent = sent
            self._queue.append(frame)
            self._changed.notify_all()

    def _send_inline(self, frame: Frame) -> int:
        try:
            return try_send_frame(self._stream, frame)
        except OSError as error:
            raise self._lost(error) from error

    def wait_unsent(self, max_unsent: int) -> None:
        """Wait while more than ``max_unsent`` messages are unsent; returns at once when the channel broke."""
        with self._changed:
            while len(self._queue) > max_unsent and not self._stopped and self._error is None:
                self._changed.wait()

    def say_goodbye(self, reason: str) -> None:
        """Queue the last frame; the thread ends after it."""
        with self._changed:
            if not self._stopped and self._error is None and not self._ending:
                if not self._queue:
                    self._head_sent = 0
                self._queue.append(goodbye_frame(reason))
            self._ending = True
            self._changed.notify_all()

    def stop(self) -> None:
        """End every wait of this channel at once; queued messages are dropped."""
        with self._changed:
            self._stopped = True
            _shutdown(self._stream)
            self._changed.notify_all()

    def join(self, timeout_s: float | None = None) -> None:
        """Wait for the sender thread."""
        self._thread.join(timeout_s)

    def close(self) -> None:
        """Close the socket; the thread must have ended."""
        self._queue.clear()
        self._stream.close()

    def _run(self) -> None:
        while True:
            with self._changed:
                while not self._queue and not self._ending and not self._stopped:
                    self._changed.wait()
                if self._stopped or not self._queue:
                    return
                frame, already_sent = self._queue[0], self._head_sent
            try:
                send_frame(self._stream, frame, already_sent=already_sent)
            except Exception as error:  # also a failed copy from the device; raised by the next send
                with self._changed:
                    if not self._stopped:
                        self._lost(error)
                    self._queue.clear()
                    self._changed.notify_all()
                return
            with self._changed:
                if self._queue:
                    self._queue.popleft()
                self._head_sent = 0
                self._changed.notify_all()
            del frame  # the tensors may go

    def _lost(self, error: Exception) -> RunError:
        """Record the first error and wake whoever waits for an arrival. The lock is held."""
        if self._error is None:
            self._error = PeerLost(f"{self.peer} was lost while a message was sent to it: {error!r}.")
            self._error.__cause__ = error
            self._mailbox.fail(self._error)
        return self._error


class RecvChannel:
    """Incoming messages of one direction from one neighbour; its thread fills the mailbox."""

    def __init__(self, link: Link, direction: Direction, mailbox: Mailbox, *, pin_memory: bool) -> None:
        self.peer: Peer = link.peer
        self._stream = link.stream
        self._direction = direction
        self._mailbox = mailbox
        self._stopped = False
        self._reader = FrameReader(link.stream, pin_memory=pin_memory)
        self._thread = threading.Thread(
            target=self._run, name=f"varuna-receive-{direction.value}-{link.peer.rank}", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """End the thread's wait for data; the mailbox must be closed for it to end everywhere."""
        self._stopped = True
        _shutdown(self._stream)

    def join(self) -> None:
        """Wait for the receiver thread."""
        self._thread.join()

    def close(self) -> None:
        """Close the socket; the thread must have ended."""
        self._stream.close()

    def _run(self) -> None:
        try:
            while not self._stopped:
                frame = self._reader.read()
                if not isinstance(frame, Arrival):
                    self._goodbye(frame.reason)
                    return
                self._mailbox.put(self._direction, frame)
        except (OSError, EOFError) as error:
            if not self._stopped:
                lost = PeerLost(f"{self.peer} was lost: {error}.")
                lost.__cause__ = error
                self._mailbox.fail(lost)
        except Exception as error:  # damaged stream, no memory: the compute thread raises it
            self._mailbox.fail(error)

    def _goodbye(self, reason: str) -> None:
        if reason:
            self._mailbox.fail(PeerLost(f"{self.peer} stopped: {reason}"))
        else:
            self._mailbox.end(self._direction)


class StageChannels:
    """All channels of one stage and its mailbox. Made by ``open_channels``."""

    def __init__(
        self,
        links: Links,
        *,
        max_unread: int,
        pin_memory: bool,
    ) -> None:
        self.mailbox = Mailbox(max_unread)
        self._lock = threading.Lock()
        self._closed = False
        outgoing = {Direction.ACTIVATION: links.next, Direction.GRADIENT: links.previous}
        incoming = {Direction.ACTIVATION: links.previous, Direction.GRADIENT: links.next}
        self._send = {
            direction: SendChannel(side[direction], direction, self.mailbox)
            for direction, side in outgoing.items()
            if side
        }
        self._receive = {
            direction: RecvChannel(side[direction], direction, self.mailbox, pin_memory=pin_memory)
            for direction, side in incoming.items()
            if side
        }

    def send(self, header: MessageHeader, message: Message) -> None:
        """Send on the channel of ``header.direction``; see ``SendChannel.send``."""
        self._send[header.direction].send(header, message)

    def wait_unsent(self, direction: Direction, max_unsent: int) -> None:
        """Wait while more than ``max_unsent`` messages of a direction are unsent."""
        self._send[direction].wait_unsent(max_unsent)

    def peer_of(self, direction: Direction) -> Peer:
        """The neighbour that sends messages of this direction here."""
        return self._receive[direction].peer

    def close(self, reason: str = "", *, timeout_s: float = 5.0) -> None:
        """Send what is queued and a goodbye, then end all threads and close all sockets.

        Args:
            reason: why, if this is not the ordinary end; the neighbours' ``PeerLost`` repeats it.
            timeout_s: how long to wait for neighbours that do not read; then as ``abort``.
        """
        deadline_s = time.monotonic() + timeout_s
        for channel in self._send.values():
            channel.say_goodbye(reason)
        for channel in self._send.values():
            channel.join(max(0.0, deadline_s - time.monotonic()))
        self.abort(reason or "closed")

    def abort(self, reason: str = "aborted") -> None:
        """End every wait on these channels at once, from any thread; end all threads and close all sockets.

        A compute thread that waits for an arrival raises ``PeerLost``.
        """
        self.mailbox.fail(PeerLost(f"The channels of this stage were closed here: {reason}."))
        with self._lock:
            if self._closed:
                return
            self._closed = True
            ends: list[SendChannel | RecvChannel] = [*self._send.values(), *self._receive.values()]
            for end in ends:
                end.stop()
            for end in ends:
                end.join()
            for end in ends:
                end.close()


def open_channels(
    store: Store,
    place: StageAddress,
    options: ConnectOptions,
    *,
    max_unread: int = DEFAULT_MAX_UNREAD,
    pin_memory: bool = False,
) -> StageChannels:
    """Connect to the neighbours and start the channels' threads.

    Args:
        store: where addresses are published; all stages of the pipeline use the same.
        place: this worker's rank and stage, its neighbours' ranks.
        options: generation, token, host, time limit.
        max_unread: messages per direction that are received ahead of compute.
        pin_memory: receive into pinned memory (for a CUDA stage).

    Raises:
        PeerLost: a neighbour did not appear or broke the connection.
        ProtocolError: a neighbour refused this worker.
    """
    links = connect_neighbours(store, place, options)
    return StageChannels(links, max_unread=max_unread, pin_memory=pin_memory)


def _shutdown(stream: socket.socket) -> None:
    try:
        stream.shutdown(socket.SHUT_RDWR)
    except OSError:
        return  # the peer was faster
