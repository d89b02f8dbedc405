"""Forked worker processes for benchmarks: run a function in P children, take back one JSON value from each.

The parent must not have computed with torch yet (a forked child must not inherit a started OpenMP pool). A
child that raises prints its traceback and ends the run; children die with their parent, whatever ends it.
"""

from __future__ import annotations

import ctypes
import json
import mmap
import os
import select
import signal
import socket
import struct
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

_PR_SET_PDEATHSIG = 1
Work = Callable[[int], Any]


@dataclass(frozen=True, kw_only=True)
class Place:
    """Where a worker is: its rank and own address, and where rank 0 serves the store."""

    rank: int
    host: str
    store_host: str
    store_port: int


def free_port() -> int:
    """A TCP port of the loopback interface that was free a moment ago."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def die_with_parent() -> None:
    """Have the kernel end this process when its parent ends."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def fork(work: Callable[[], Any]) -> tuple[int, int]:
    """Start ``work`` in a child; returns its process id and the read end of a pipe with its JSON result."""
    read_end, write_end = os.pipe()
    sys.stdout.flush()
    process_id = os.fork()
    if process_id:
        os.close(write_end)
        return process_id, read_end
    code = 1
    try:
        die_with_parent()
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.close(read_end)
        result = json.dumps(work()).encode()
        with os.fdopen(write_end, "wb") as pipe:
            pipe.write(result)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def end(process_ids: Sequence[int]) -> None:
    """Kill and reap children that may still run."""
    for process_id in process_ids:
        try:
            os.kill(process_id, signal.SIGKILL)
            os.waitpid(process_id, 0)
        except (ProcessLookupError, ChildProcessError):
            continue


def run_workers(num_workers: int, work: Work, timeout_s: float = 300.0) -> list[Any]:
    """Run ``work(rank)`` in ``num_workers`` children and return their results in rank order.

    Raises:
        RuntimeError: a child ended without a result, or ``timeout_s`` passed.
    """
    children = [fork(lambda rank=rank: work(rank)) for rank in range(num_workers)]
    waiting = {read_end: rank for rank, (_, read_end) in enumerate(children)}
    received: dict[int, bytes] = dict.fromkeys(range(num_workers), b"")
    deadline = time.monotonic() + timeout_s
    try:
        while waiting:
            left = deadline - time.monotonic()
            if left <= 0:
                raise RuntimeError(f"Workers {sorted(waiting.values())} did not end within {timeout_s:g} s.")
            for read_end in select.select(list(waiting), [], [], left)[0]:
                rank = waiting[read_end]
                part = os.read(read_end, 1 << 16)
                received[rank] += part
                if not part:
                    del waiting[read_end]
                    if not received[rank]:
                        raise RuntimeError(f"Worker {rank} ended without a result; its traceback is above.")
        return [json.loads(received[rank]) for rank in range(num_workers)]
    finally:
        end([process_id for process_id, _ in children])
        for _, read_end in children:
            os.close(read_end)


class StartLine:
    """Lets all children of one fork start a measured piece of work at one moment, without any network.

    Create before forking. Clock: ``time.monotonic``, which all processes of a machine share.
    """

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._shared = mmap.mmap(-1, 16 * num_workers)

    def start(self, rank: int, round_index: int, lead_s: float = 0.01) -> float:
        """Wait for all workers in round ``round_index`` (1, 2, ...), then until the start; returns its time."""
        struct.pack_into("d", self._shared, 16 * rank, time.monotonic())
        struct.pack_into("q", self._shared, 16 * rank + 8, round_index)
        while True:
            entries = [struct.unpack_from("dq", self._shared, 16 * other) for other in range(self._num_workers)]
            if all(arrived_round >= round_index for _, arrived_round in entries):
                break
            time.sleep(0.0005)
        start = max(moment for moment, _ in entries) + lead_s
        time.sleep(max(0.0, start - time.monotonic()))
        return start
