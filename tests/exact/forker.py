"""A process with torch and the models imported that forks the workers of one job after another.

``python -m tests.exact.forker`` reads one request per line on standard input (JSON, see ``Request``) and
answers each, when all its workers have ended, with their exit codes as a JSON list. Its own process stays
single-threaded, so that forking is safe and a worker starts in milliseconds. It ends when its input does.
"""

from __future__ import annotations

import json
import os
import select
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Request:
    """One job: what ``tests.exact.worker`` trains, and on how many workers.

    Attributes:
        case: name of a ``ModelCase``.
        num_workers: P·D.
        num_stages, micro_batch_size, schedule, recompute: the layout.
        batch_size, num_steps, seed: of the training run.
        directory: where every worker leaves its results and its output.
        master_port: a TCPStore on loopback, served by whoever asks.
        timeout_s: all workers are killed then.
    """

    case: str
    num_workers: int
    num_stages: int
    micro_batch_size: int
    schedule: str
    recompute: bool
    batch_size: int
    num_steps: int
    seed: int
    directory: str
    master_port: int
    timeout_s: float

    def to_json(self) -> str:
        """One line."""
        return json.dumps(asdict(self))


def fork_worker(request: Request, rank: int, work: Callable[[Request, int], None]) -> int:
    """Start one worker; returns its process id. Its output goes to ``worker-<rank>.log``."""
    process_id = os.fork()
    if process_id:
        return process_id
    code = 1
    try:
        log = os.open(Path(request.directory) / f"worker-{rank}.log", os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
        os.dup2(log, 1)
        os.dup2(log, 2)
        work(request, rank)
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


def wait_for(process_ids: list[int], timeout_s: float) -> list[int]:
    """Exit codes of all, negative for a signal; kills those that run on after ``timeout_s`` or a failure."""
    descriptors = {os.pidfd_open(process_id): process_id for process_id in process_ids}
    codes: dict[int, int] = {}
    deadline = time.monotonic() + timeout_s
    try:
        waiting = dict(descriptors)
        while waiting:
            # A failed worker leaves its peers five seconds to notice.
            if any(codes.values()):
                deadline = min(deadline, time.monotonic() + 5.0)
            for descriptor in _ended(list(waiting), deadline - time.monotonic()):
                process_id = waiting.pop(descriptor)
                codes[process_id] = os.waitstatus_to_exitcode(os.waitpid(process_id, 0)[1])
            if waiting and time.monotonic() >= deadline:
                for process_id in waiting.values():
                    os.kill(process_id, signal.SIGKILL)
                deadline = time.monotonic() + 60.0
    finally:
        for descriptor in descriptors:
            os.close(descriptor)
    return [codes[process_id] for process_id in process_ids]


def _ended(descriptors: list[int], timeout_s: float) -> list[int]:
    return select.select(descriptors, [], [], max(0.0, timeout_s))[0]


def main() -> None:
    from tests.exact import worker

    print("ready", flush=True)
    for line in sys.stdin:
        request = Request(**json.loads(line))
        process_ids = [fork_worker(request, rank, worker.work) for rank in range(request.num_workers)]
        print(json.dumps(wait_for(process_ids, request.timeout_s)), flush=True)


if __name__ == "__main__":
    main()
