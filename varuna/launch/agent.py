"""The agent of this machine: tells the manager which workers have started and ended, and hears its orders.

A worker is called by its *incarnation*: ``<machine>.<worker index>.<four random digits>``, never used twice.
"""

from __future__ import annotations

import os
import queue
import secrets
import socket
import threading

from varuna.morph.link import Link, Refusal
from varuna.morph.messages import (
    JobEnded,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerStarted,
    decode_to_agent,
    encode,
)

Order = StopWorker | StartWorker | JobEnded


def machine_name() -> str:
    """What this machine is called: its host name."""
    return socket.gethostname() or "localhost"


class Agent:
    """The launcher's line to the manager. Orders wait until the launcher's thread takes them.

    Args:
        url: of the manager.
        token: the job's.
        machine: name of this machine.
    """

    def __init__(self, url: str, token: str, machine: str) -> None:
        self._machine = machine
        self._incarnations: dict[int, str] = {}
        self._lock = threading.Lock()
        self._told: list[bytes] = []
        self._orders: queue.SimpleQueue[Order | Refusal] = queue.SimpleQueue()
        self._wakeup, self._wakeup_writer = os.pipe()
        os.set_blocking(self._wakeup, False)
        self._link = Link(
            f"{url}/agent",
            token,
            {"machine": machine},
            received=lambda data: self._put(decode_to_agent(data)),
            greeting=self._greeting,
            refused=self._put,
        )

    def fileno(self) -> int:
        """What becomes readable when there are orders."""
        return self._wakeup

    def incarnation_of(self, worker_index: int) -> str:
        """The name by which the manager knows a worker of this machine."""
        if worker_index not in self._incarnations:
            self._incarnations[worker_index] = f"{self._machine}.{worker_index}.{secrets.token_hex(2)}"
        return self._incarnations[worker_index]

    def worker_index_of(self, incarnation: str) -> int | None:
        """The opposite; None if no such worker was started here."""
        return next((index for index, name in self._incarnations.items() if name == incarnation), None)

    def worker_started(self, worker_index: int, rank: int | None) -> None:
        """A worker's process exists; ``rank`` of those that found the job."""
        name = self.incarnation_of(worker_index)
        self._tell(WorkerStarted(incarnation=name, machine=self._machine, rank=rank))

    def worker_exited(self, worker_index: int, code: int, failure: str) -> None:
        """A worker's process is gone; ``failure`` in one line if it left a record."""
        name = self.incarnation_of(worker_index)
        self._tell(WorkerExited(incarnation=name, code=code, failure=failure))

    def orders(self) -> list[Order | Refusal]:
        """What the manager has asked since the last call."""
        try:
            os.read(self._wakeup, 4096)
        except BlockingIOError:
            return []
        orders = []
        while True:
            try:
                orders.append(self._orders.get_nowait())
            except queue.Empty:
                return orders

    def close(self) -> None:
        """End the line, after what was to be told if the manager is there."""
        self._link.close(patience_s=0.0)
        os.close(self._wakeup)
        os.close(self._wakeup_writer)

    def _tell(self, message: WorkerStarted | WorkerExited) -> None:
        data = encode(message)
        with self._lock:
            self._told.append(data)
        self._link.send(data)

    # --- the link's threads -----------------------------------------------------------------

    def _greeting(self) -> list[bytes]:
        """All that was ever told: a manager that was started again may have missed some of it."""
        with self._lock:
            return list(self._told)

    def _put(self, order: Order | Refusal) -> None:
        self._orders.put(order)
        os.write(self._wakeup_writer, b"x")
