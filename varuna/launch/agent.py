"""The agent of this machine: tells the manager what happens here, and hears its orders.

A worker is called by its *incarnation*: ``<machine>.<worker index>.<four random digits>``, never used twice.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading
import time
from dataclasses import dataclass

import msgspec

from varuna.morph.link import Link, Refusal
from varuna.morph.messages import (
    Alive,
    JobEnded,
    LeaveAsked,
    LeaveWithdrawn,
    Offer,
    StartFounders,
    StartWorker,
    StopWorker,
    Welcome,
    WorkerExited,
    WorkerStarted,
    decode_to_agent,
    encode,
)
from varuna.morph.notices import NoticeWithdrawn, PreemptionNotice, Told
from varuna.morph.whereabouts import manager_url
from varuna.versions import installed_versions, must_be_equal

Order = Welcome | StartFounders | StartWorker | StopWorker | JobEnded | Refusal | Told
"""What waits for the launcher: the manager's orders, and what is heard of this machine's future."""

_Said = Offer | WorkerStarted | WorkerExited | LeaveAsked | LeaveWithdrawn

_NOW_S = 0.1
"""A deadline of 0 means at any moment; to the manager, 0 is an unknown one."""

_END_PATIENCE_S = 5.0
_MOST_LETTERS = 200  # of a name in a message


def machine_name() -> str:
    """What this machine is called: its host name."""
    return socket.gethostname() or "localhost"


@dataclass(frozen=True)
class _Entry:
    """Something that was said, and when, on the monotonic clock."""

    message: _Said
    at_s: float

    def encoded(self) -> bytes:
        """As it has to be said now."""
        message = self.message
        if isinstance(message, LeaveAsked) and message.deadline_s > 0:
            left_s = max(_NOW_S, message.deadline_s - (time.monotonic() - self.at_s))
            message = msgspec.structs.replace(message, deadline_s=left_s)
        return encode(message)


class Agent:
    """The launcher's line to the manager. Orders wait until the launcher's thread takes them.

    Args:
        url: of the manager, or of a file that has it, see ``whereabouts``.
        token: the job's.
        machine: name of this machine.
        name: of this agent, which no other has; that of the machine if there is one agent a machine.
    """

    def __init__(self, url: str, token: str, machine: str, *, name: str = "") -> None:
        self.machine = machine
        self.name = name or machine
        self._incarnations: dict[int, str] = {}
        self.num_heard = 0
        self._num_offers = 0
        self._lock = threading.Lock()
        self._said: list[_Entry] = []
        self._orders: queue.SimpleQueue[Order] = queue.SimpleQueue()
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._link = Link(
            lambda: f"{manager_url(url)}/agent",
            token,
            {"machine": machine, "agent": self.name, **must_be_equal(installed_versions())},
            received=self._received,
            greeting=self._greeting,
            refused=self.put,
        )

    def fileno(self) -> int:
        """What becomes readable when there are orders."""
        return self._wakeup

    @property
    def is_connected(self) -> bool:
        """The manager is there."""
        return self._link.is_connected

    def incarnation_of(self, worker_index: int) -> str:
        """The name by which the manager knows a worker of this machine."""
        if worker_index not in self._incarnations:
            self._incarnations[worker_index] = f"{self.machine}.{worker_index}.{secrets.token_hex(2)}"
        return self._incarnations[worker_index]

    def worker_index_of(self, incarnation: str) -> int | None:
        """The opposite; None if no such worker was started here."""
        return next((index for index, name in self._incarnations.items() if name == incarnation), None)

    # --- what it says -----------------------------------------------------------------------

    def offer(self, num_workers: int) -> None:
        """Workers can be started here: the manager says when, and which."""
        self._num_offers += 1
        self._say(Offer(num_workers=num_workers, number=self._num_offers))

    def worker_started(self, worker_index: int, rank: int | None, *, attempt: int = 0, pid: int = 0) -> None:
        """A worker's process exists; ``rank`` of those that found the job, at which ``attempt``."""
        name = self.incarnation_of(worker_index)
        self._say(WorkerStarted(incarnation=name, machine=self.machine, rank=rank, attempt=attempt, pid=pid))

    def worker_exited(self, worker_index: int, code: int, failure: str) -> None:
        """A worker's process is gone; ``failure`` in one line if it left a record."""
        name = self.incarnation_of(worker_index)
        self._say(WorkerExited(incarnation=name, code=code, failure=failure))

    def worker_has_to_go(self, worker_index: int, deadline_s: float, source: str) -> None:
        """A worker's process has so many seconds left."""
        name, left_s = self.incarnation_of(worker_index), max(_NOW_S, deadline_s)
        self._say(LeaveAsked(incarnation=name, deadline_s=left_s, source=source))

    def noticed(self, notice: PreemptionNotice) -> None:
        """This machine goes away."""
        self._say(
            LeaveAsked(
                machine=notice.machine,
                deadline_s=max(_NOW_S, notice.deadline_s),
                source=notice.source,
                event_id=notice.event_id[:_MOST_LETTERS],
            )
        )

    def withdrawn(self, withdrawn: NoticeWithdrawn) -> None:
        """It does not."""
        with self._lock:
            self._said = [entry for entry in self._said if not _announces(entry.message, withdrawn)]
        self._say(
            LeaveWithdrawn(
                machine=withdrawn.machine, source=withdrawn.source, event_id=withdrawn.event_id[:_MOST_LETTERS]
            )
        )

    # --- what it hears ----------------------------------------------------------------------

    def orders(self) -> list[Order]:
        """What has come since the last call."""
        try:
            os.read(self._wakeup, 4096)
        except BlockingIOError:
            return []
        orders: list[Order] = []
        while True:
            try:
                orders.append(self._orders.get_nowait())
            except queue.Empty:
                return orders

    def put(self, order: Order) -> None:
        """Something that the launcher's thread shall see; from any thread."""
        self._orders.put(order)
        os.write(self._wakeup_writer, b"x")

    def close(self, *, is_remote: bool = False) -> None:
        """End the line, after what was to be told if the manager is there, or soon is if it ``is_remote``."""
        self._link.close(patience_s=_END_PATIENCE_S if is_remote else 0.0)
        os.close(self._wakeup)
        os.close(self._wakeup_writer)

    # --- the link's threads -----------------------------------------------------------------

    def _say(self, message: _Said) -> None:
        entry = _Entry(message, time.monotonic())
        with self._lock:
            self._said.append(entry)
        self._link.send(entry.encoded())

    def _received(self, data: bytes) -> None:
        order = decode_to_agent(data)
        if isinstance(order, Alive):
            self.num_heard += 1
        else:
            self.put(order)

    def _greeting(self) -> list[bytes]:
        """All that was ever said: a manager that was started again may have missed some of it."""
        self.num_heard += 1  # it has answered
        with self._lock:
            return [entry.encoded() for entry in self._said]


def _announces(message: _Said, withdrawn: NoticeWithdrawn) -> bool:
    return isinstance(message, LeaveAsked | LeaveWithdrawn) and (
        (message.source, message.event_id) == (withdrawn.source, withdrawn.event_id[:_MOST_LETTERS])
    )
