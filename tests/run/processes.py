"""Real worker processes for tests: forked from pytest, JSON back through a pipe, all dead at the end.

    results = run_workers(4, body, arguments...)      # body(context, *arguments) -> JSON value

``body`` runs once per rank in its own process with one thread, a store of its own and CPU tensors. The first
exception of any rank becomes ``WorkersFailed`` with every traceback.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from typing import Any

import torch

from varuna.run.groups import Groups, World, connect

TIME_LIMIT_S = 60.0
_fork = multiprocessing.get_context("fork")


class WorkersFailed(AssertionError):
    """A worker raised, died or did not end in time; ``errors`` maps rank to traceback text."""

    def __init__(self, errors: dict[int, str]) -> None:
        self.errors = errors
        super().__init__("\n".join(f"--- worker {rank}\n{text}" for rank, text in sorted(errors.items())))


@dataclass(frozen=True, kw_only=True)
class Context:
    """What a worker's body gets."""

    world: World
    port: int

    @property
    def rank(self) -> int:
        return self.world.rank

    def groups(self, generation: int = 0, timeout_s: float = 20.0) -> Groups:
        return Groups(self.world, generation, timeout_s=timeout_s)


def run_workers(
    size: int, body: Callable[..., Any], *arguments: Any, time_limit_s: float = TIME_LIMIT_S
) -> list[Any]:
    """Results of ``body(context, *arguments)`` by rank."""
    listener = socket.create_server(("127.0.0.1", 0), backlog=64)
    port = listener.getsockname()[1]
    workers = []
    connections: dict[Connection, int] = {}
    try:
        for rank in range(size):
            receiver, sender = _fork.Pipe()
            place = _Place(rank=rank, size=size, port=port, listen_fd=listener.fileno())
            worker = _fork.Process(target=_main, args=(place, sender, body, arguments), daemon=True)
            worker.start()
            sender.close()
            workers.append(worker)
            connections[receiver] = rank
        return _collect(connections, time.monotonic() + time_limit_s)
    finally:
        listener.close()
        for receiver in connections:
            with contextlib.suppress(OSError):  # it died already
                receiver.send_bytes(b"end")
        for worker in workers:
            worker.join(timeout=2.0)
            if worker.is_alive():
                worker.kill()
                worker.join()
            worker.close()
        for receiver in connections:
            receiver.close()


def _collect(connections: dict[Connection, int], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    errors: dict[int, str] = {}
    open_connections = dict(connections)
    while open_connections:
        ready = wait(list(open_connections), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            errors.update(dict.fromkeys(open_connections.values(), "did not end in time"))
            break
        for connection in ready:
            rank = open_connections.pop(connection)
            try:
                outcome = json.loads(connection.recv_bytes())
            except EOFError:
                outcome = {"error": "died without a word"}
            if "error" in outcome:
                errors[rank] = outcome["error"]
                deadline = min(deadline, time.monotonic() + 3.0)  # others may wait for this one
            else:
                results[rank] = outcome["result"]
    if errors:
        raise WorkersFailed(errors)
    return [results[rank] for rank in sorted(results)]


@dataclass(frozen=True, kw_only=True)
class _Place:
    rank: int
    size: int
    port: int
    listen_fd: int


def _main(place: _Place, sender: Connection, body: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    torch.set_num_threads(1)
    code = 0
    try:
        store = connect(
            place.rank,
            place.size,
            "127.0.0.1",
            place.port,
            prefix="test",
            timeout_s=20.0,
            listen_fd=os.dup(place.listen_fd) if place.rank == 0 else None,
        )
        world = World(rank=place.rank, size=place.size, local_rank=place.rank, store=store)
        context = Context(world=world, port=place.port)
        outcome = {"result": body(context, *arguments)}
    except BaseException:
        outcome = {"error": traceback.format_exc()}
        code = 1
    sender.send_bytes(json.dumps(outcome).encode())
    with contextlib.suppress(EOFError, OSError):
        sender.recv_bytes()  # stay until all have ended: worker 0 serves the store
    os._exit(code)
