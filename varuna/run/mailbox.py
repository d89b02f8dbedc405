"""Arrivals of one stage: filled by receiver threads, emptied by the compute thread, one condition between.

Two first-in-first-out queues, activations and gradients. A queue holds at most ``max_unread`` messages: a full
one makes its receiver stop reading, the stream fills, and the sender keeps what it could not send. That cannot
deadlock: the compute thread never waits for room when it sends, and the next message in order is always read.
"""

from __future__ import annotations

import threading
from collections import deque
from dataclasses import dataclass

from varuna.run.wire import Direction, Message, MessageHeader


@dataclass(frozen=True, slots=True)
class Arrival:
    """One received message: what it is for, and its tensors (CPU memory, owned by whoever takes it)."""

    header: MessageHeader
    message: Message


class Mailbox:
    """What has arrived for this stage and what went wrong.

    Attributes:
        failure: the first error of any channel, or None; it ends every wait.
        version: grows with every change; read it before looking, then ``wait_past`` it.
    """

    def __init__(self, max_unread: int) -> None:
        self.failure: Exception | None = None
        self.version = 0
        self._max_unread = max_unread
        self._queues: dict[Direction, deque[Arrival]] = {direction: deque() for direction in Direction}
        self._ended: set[Direction] = set()
        lock = threading.Lock()
        self._changed = threading.Condition(lock)
        self._room = threading.Condition(lock)

    def put(self, direction: Direction, arrival: Arrival) -> None:
        """Called by a receiver: append, then wait until there is room for one more (or something failed)."""
        queue = self._queues[direction]
        with self._changed:
            queue.append(arrival)
            self._notify()
            while len(queue) >= self._max_unread and self.failure is None:
                self._room.wait()

    def end(self, direction: Direction) -> None:
        """Called by a receiver: the peer closed this channel in good order."""
        with self._changed:
            self._ended.add(direction)
            self._notify()

    def fail(self, error: Exception) -> None:
        """Record an error (only the first is kept) and end every wait at once."""
        with self._changed:
            if self.failure is None:
                self.failure = error
            self._notify()
            self._room.notify_all()

    def num_unread(self, direction: Direction) -> int:
        """Messages that arrived and were not taken."""
        return len(self._queues[direction])

    def has_ended(self, direction: Direction) -> bool:
        """The peer closed this channel in good order; unread messages stay."""
        return direction in self._ended

    def take(self, direction: Direction) -> Arrival:
        """Remove the oldest message; there must be one."""
        with self._changed:
            queue = self._queues[direction]
            arrival = queue.popleft()
            if len(queue) == self._max_unread - 1:
                self._room.notify_all()
            return arrival

    def wait_past(self, version: int) -> None:
        """Sleep until something changed after ``version``; signals interrupt it."""
        with self._changed:
            while self.version == version:
                self._changed.wait()

    def _notify(self) -> None:
        self.version += 1
        self._changed.notify_all()
