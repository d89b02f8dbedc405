"""Run a function in several forked processes that share a store: workers in a fraction of a second.

    outcomes = run_forked(4, lambda rank, store: rank * 10)
    [outcome.value for outcome in outcomes]        # [0, 10, 20, 30]

Forked from a process that has torch imported, so that a worker costs milliseconds and not seconds. Fork while
the parent has one thread and has not used CUDA; a child starts with one OpenMP thread. The store is served by a
process of its own, so that any worker may die. Every process has ended when ``run_forked`` returns or raises.
"""

from __future__ import annotations

import contextlib
import json
import os
import selectors
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta

import torch
from torch.distributed import Store, TCPStore  # type: ignore[attr-defined]

_HOST = "127.0.0.1"


@dataclass(frozen=True, kw_only=True)
class WorkerOutcome:
    """How a forked worker ended.

    Attributes:
        rank: which worker.
        exit_code: of its process; negative: the signal that killed it.
        value: what the function returned, after a round trip through JSON.
        error: traceback of what it raised, "" if it returned; also set when it was killed or ran out of time.
    """

    rank: int
    exit_code: int
    value: object = None
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class _Child:
    rank: int
    process_id: int
    result_fd: int


def run_forked(
    num_workers: int, work: Callable[[int, Store], object], *, timeout_s: float = 60.0
) -> tuple[WorkerOutcome, ...]:
    """Call ``work(rank, store)`` in ``num_workers`` processes at once.

    Args:
        num_workers: processes, ranks from 0.
        work: returns something that JSON can hold. What it raises is reported, not raised here.
        timeout_s: after which the workers that still run are killed.

    Returns:
        One outcome per rank, in order.
    """
    children: list[_Child] = []
    with _served_store(timeout_s) as port:
        try:
            children = [_fork_worker(rank, port, work, timeout_s) for rank in range(num_workers)]
            results = _read_results(children, time.monotonic() + timeout_s)
        finally:
            exit_codes = {child.rank: _end(child.process_id) for child in children}
            for child in children:
                os.close(child.result_fd)
    return tuple(_outcome(rank, exit_codes[rank], results[rank]) for rank in range(num_workers))


def values_of(outcomes: tuple[WorkerOutcome, ...]) -> list[object]:
    """What each worker returned; ``AssertionError`` with the tracebacks if any did not return."""
    failed = [f"worker {outcome.rank}: {outcome.error}" for outcome in outcomes if outcome.error]
    assert not failed, "\n".join(failed)
    return [outcome.value for outcome in outcomes]


def barrier(store: Store, name: str, num_workers: int) -> None:
    """Wait until ``num_workers`` workers have called this with this name; a name serves once."""
    if store.add(f"{name}/count", 1) == num_workers:
        store.set(f"{name}/open", "1")
    store.wait([f"{name}/open"])


@contextlib.contextmanager
def _served_store(timeout_s: float) -> Iterator[int]:
    """A process that serves a store until the block ends; its port."""
    listener = socket.create_server((_HOST, 0), backlog=1024)
    port: int = listener.getsockname()[1]
    read_fd, write_fd = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        with _exiting():
            os.close(write_fd)
            store = TCPStore(
                _HOST, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
            )
            os.read(read_fd, 1)  # until the parent closes its end, or dies
            del store
    listener.close()
    os.close(read_fd)
    try:
        yield port
    finally:
        os.close(write_fd)
        _end(process_id, timeout_s=5.0)


def _fork_worker(rank: int, port: int, work: Callable[[int, Store], object], timeout_s: float) -> _Child:
    read_fd, write_fd = os.pipe()
    process_id = os.fork()
    if process_id == 0:
        with _exiting():
            os.close(read_fd)
            os.set_blocking(write_fd, True)
            _work_in_child(rank, port, work, timeout_s, write_fd)
    os.close(write_fd)
    return _Child(rank=rank, process_id=process_id, result_fd=read_fd)


def _work_in_child(
    rank: int, port: int, work: Callable[[int, Store], object], timeout_s: float, write_fd: int
) -> None:
    torch.set_num_threads(1)
    try:
        store = TCPStore(_HOST, port, is_master=False, timeout=timedelta(seconds=timeout_s))
        result = {"value": work(rank, store)}
    except BaseException:
        result = {"error": traceback.format_exc()}
    with os.fdopen(write_fd, "w") as stream:
        json.dump(result, stream)


@contextlib.contextmanager
def _exiting() -> Iterator[None]:
    """The child's whole life: nothing of the parent (exit handlers, test runner) runs in it."""
    code = 1
    try:
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM):
            signal.signal(number, signal.SIG_DFL)
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def _read_results(children: list[_Child], deadline_s: float) -> dict[int, bytes]:
    """What each child wrote until it closed its end or time was up."""
    results = {child.rank: b"" for child in children}
    with selectors.DefaultSelector() as selector:
        for child in children:
            selector.register(child.result_fd, selectors.EVENT_READ, child)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline_s - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                results[key.data.rank] += data
                if not data:
                    selector.unregister(key.fd)
    return results


def _end(process_id: int, timeout_s: float = 1.0) -> int:
    """Reap a process, killing it if it does not end by itself in time; its exit code."""
    deadline_s = time.monotonic() + timeout_s
    while time.monotonic() < deadline_s:
        ended_id, status = os.waitpid(process_id, os.WNOHANG)
        if ended_id:
            return os.waitstatus_to_exitcode(status)
        time.sleep(0.002)
    os.kill(process_id, signal.SIGKILL)
    return os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])


def _outcome(rank: int, exit_code: int, result: bytes) -> WorkerOutcome:
    try:
        fields = json.loads(result)
    except ValueError:
        return WorkerOutcome(
            rank=rank, exit_code=exit_code, error=f"ended without a result, exit code {exit_code}"
        )
    return WorkerOutcome(rank=rank, exit_code=exit_code, **fields)
