"""A process with torch, Varuna and all that capture imports, in which one job after another starts at once.

``python -m tests.e2e.warm`` answers requests, one JSON object a line:

- ``mode: "varuna"``: the real `varuna` command (launcher, zygote, store, workers), but the launcher and its
  zygote are forked from here and need not import anything.
- ``mode: "alone"``: workers that nobody supervises; each must end by itself. The store is a process of its own.
- ``mode: "start"``: as "varuna", but only the first answer comes: several commands run at once.
- ``mode: "join"``: the end of one that was started so, by ``pid``; ``mode: "left"``: what is left of all.

The answers: ``{"pid": ...}`` when it runs, then ``{"codes": [...], "ends_s": [...], "left": [...]}`` when it
has ended: exit codes and monotonic times of the command (or of each worker), and what is left of it.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import psutil
import torch
from torch import nn
from torch.distributed import TCPStore

import varuna.session  # noqa: F401
from tests.e2e.namespace import enter
from varuna import cli
from varuna.launch import zygote_process
from varuna.launch.processes import adopt_orphans, die_with_parent, num_threads
from varuna.launch.protocol import Channel, Ready
from varuna.launch.zygote import Zygote
from varuna.partition import partition

LONGEST_S = 240.0
ForkedJob = Callable[[], int]


class _Become(BaseException):
    """Leads a forked zygote's child out of the launcher's stack to ``main``."""

    def __init__(self, job: ForkedJob | None) -> None:
        super().__init__()
        self.job = job


class _ForkedZygote:
    """What the launcher uses of ``subprocess.Popen``."""

    def __init__(self, pid: int) -> None:
        self.pid = pid
        self.returncode: int | None = None
        self._ended = os.pidfd_open(pid)

    def wait(self, timeout: float | None = None) -> int:
        """As Popen's."""
        if self.returncode is None:
            if not select.select([self._ended], [], [], timeout)[0]:
                raise subprocess.TimeoutExpired("zygote", timeout or 0.0)
            self.returncode = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])
        return self.returncode

    def kill(self) -> None:
        """As Popen's."""
        os.kill(self.pid, signal.SIGKILL)


def _fork_zygote(environ: Mapping[str, str], num_workers: int) -> tuple[Any, Channel]:
    """In the place of ``zygote_process.start_zygote``, which executes a new interpreter."""
    del num_workers
    ours, its = socket.socketpair()
    pid = os.fork()
    if pid:
        its.close()
        return _ForkedZygote(pid), Channel(ours)
    ours.close()
    os.setsid()
    die_with_parent(signal.SIGKILL)
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
    os.environ.pop("VARUNA_TOKEN", None)
    os.environ.update(environ)
    channel = Channel(its)
    channel.send(Ready(import_s=0.0))
    raise _Become(Zygote(channel).serve())


def _be_command(request: Mapping[str, Any]) -> int:
    """In a forked child: the `varuna` command."""
    zygote_process.start_zygote = _fork_zygote  # type: ignore[assignment]
    if request.get("namespace"):
        enter(request["namespace"])
    sys.argv = ["varuna", *request["arguments"]]
    job: ForkedJob | None = None
    try:
        cli.main(request["arguments"], standalone_mode=False)
    except _Become as become:
        job = become.job
    return job() if job is not None else 0


def _be_worker(request: Mapping[str, Any], rank: int, port: int) -> int:
    """In a forked child: one of ``num_workers`` that nobody supervises."""
    size = request["num_workers"]
    os.environ.update(
        RANK=str(rank),
        WORLD_SIZE=str(size),
        LOCAL_RANK=str(rank),
        LOCAL_WORLD_SIZE=str(size),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="alone",
    )
    sys.argv = request["arguments"]
    sys.path.insert(0, request["cwd"])
    runpy.run_path(request["arguments"][0], run_name="__main__")
    return 0


def _be_store(listener: socket.socket) -> int:
    port = listener.getsockname()[1]
    store = TCPStore(
        "127.0.0.1", port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach()
    )
    while store.port == port:
        signal.pause()
    return 0


def _forked(work: ForkedJob, request: Mapping[str, Any], name: str) -> int:
    """A child in a session of its own that does ``work`` with the interpreter's own ending; returns its id."""
    pid = os.fork()
    if pid:
        return pid
    os.setsid()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    for stream, target in (("out", 1), ("err", 2)):
        fd = os.open(Path(request["cwd"]) / f"{name}.{stream}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(fd, target)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.chdir(request["cwd"])
    os.environ.update(request["environ"])
    tempfile.tempdir = None  # looked up again: the request may have its own
    sys.exit(work())


def _answer(values: Mapping[str, Any]) -> None:
    os.write(1, json.dumps(values).encode() + b"\n")


def _wait(pids: list[int]) -> dict[str, Any]:
    """Until all have ended, or are killed because that takes too long."""
    give_up_s = time.monotonic() + LONGEST_S
    ends: dict[int, tuple[int, float]] = {}
    waiting = {os.pidfd_open(pid): pid for pid in pids}
    while waiting:
        ended = select.select(list(waiting), [], [], max(0.0, give_up_s - time.monotonic()))[0]
        for pid in () if ended else waiting.values():
            os.kill(pid, signal.SIGKILL)
        for fd in ended:
            pid = waiting.pop(fd)
            os.close(fd)
            code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
            ends[pid] = code, time.monotonic()
    return {"codes": [ends[pid][0] for pid in pids], "ends_s": [ends[pid][1] for pid in pids]}


def _end_what_is_left() -> list[str]:
    """Descendants of a job that outlived it came to this process; it ends them and names them."""
    left = []
    for process in psutil.Process().children(recursive=True):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() != psutil.STATUS_ZOMBIE:
                left.append(f"{process.name()} ({process.pid})")
                process.kill()
            process.wait(5)
    return left


def _start_command(request: Mapping[str, Any]) -> int:
    pid = _forked(lambda: _be_command(request), request, request.get("name", "command"))
    _answer({"pid": pid})
    return pid


def _run_command(request: Mapping[str, Any]) -> None:
    pid = _start_command(request)
    ended = _wait([pid])
    _answer({**ended, "left": _end_what_is_left()})


def _run_alone(request: Mapping[str, Any]) -> None:
    with socket.create_server(("127.0.0.1", 0), backlog=64) as listener:
        port = listener.getsockname()[1]
        store = _forked(lambda: _be_store(listener), request, "store")
    pids = [
        _forked(functools.partial(_be_worker, request, rank, port), request, f"worker-{rank}")
        for rank in range(request["num_workers"])
    ]
    _answer({"pid": pids[0]})
    ended = _wait(pids)
    os.kill(store, signal.SIGKILL)
    os.waitpid(store, 0)
    _answer({**ended, "left": _end_what_is_left()})


class _Toy(nn.Module):
    """Captured once here, so that what capture imports is there before the first fork."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x).square().mean()


def main() -> None:
    """Serve requests until standard input ends."""
    torch.set_num_threads(1)
    adopt_orphans()
    for training in (True, False):
        partition(_Toy(), torch.ones(2, 2), training=training)
    gc.collect()
    gc.freeze()
    assert num_threads() == 1, "a process with threads cannot be forked safely"
    _answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        _MODES[request["mode"]](request)


_MODES: dict[str, Callable[[Mapping[str, Any]], object]] = {
    "varuna": _run_command,
    "alone": _run_alone,
    "start": _start_command,
    "join": lambda request: _answer(_wait([request["pid"]])),
    "left": lambda _: _answer({"left": _end_what_is_left()}),
}


if __name__ == "__main__":
    main()
