"""The process that has torch imported and forks workers: ``import torch`` is paid once, not once per worker.

Started by the launcher with a control socket (``protocol.py``); lives in a session of its own, so a Ctrl-C in
the terminal reaches the launcher alone, which decides what workers hear of it. It has one thread, joins no
process group, never touches CUDA, and uses no OpenMP pool: what a fork must not copy is never there. When the
launcher ends, however it ends, the control socket ends, and everything that was forked here is killed.
"""

from __future__ import annotations

import contextlib
import gc
import os
import selectors
import signal
import socket
import sys
import time
from collections.abc import Callable

from varuna.aside import leave
from varuna.config import cache_dir
from varuna.launch.processes import (
    adopt_orphans,
    die_with_parent,
    exit_code,
    kill_children,
    kill_group,
    num_threads,
    set_process_name,
)
from varuna.launch.protocol import (
    Channel,
    Exited,
    Ready,
    SendSignal,
    Started,
    StartManager,
    StartProcess,
    StartStore,
    StoreReady,
    decode_request,
)
from varuna.launch.worker import run_worker
from varuna.plan.compiled import are_kept_beside_source, compile_loops

STORE_NAME = "store"
MANAGER_NAME = "manager"
ForkedJob = Callable[[], int]  # what a forked child is to do; its result is the exit code

_STORE_BACKLOG = 1024


def main() -> None:
    """Entry point; ``sys.argv[1]`` is the number of the control socket's descriptor."""
    die_with_parent(signal.SIGKILL)  # until the loop below watches the socket
    for signum in (signal.SIGINT, signal.SIGTERM):  # they may reach all of a job; the launcher decides
        signal.signal(signum, signal.SIG_IGN)
    channel = Channel(socket.socket(fileno=int(sys.argv[1])))
    if not are_kept_beside_source():
        _fork_compiler(channel)
    started_s = time.monotonic()
    _import_what_workers_need()
    channel.send(Ready(import_s=time.monotonic() - started_s))
    job = Zygote(channel).serve()
    if job is None:
        os._exit(0)  # nothing here needs the interpreter's orderly end, which takes a while with torch
    leave(job())


def _fork_compiler(channel: Channel) -> None:
    """Have a process of its own compile what planning needs, while this one imports torch and workers start."""
    zygote_pid = os.getpid()
    if os.fork():
        return
    _be_child("compile", zygote_pid)
    channel.close()
    with contextlib.suppress(Exception):  # whoever needs it compiles it then, and is told
        compile_loops(cache_dir(os.environ))
    os._exit(0)


def _be_child(name: str, zygote_pid: int) -> None:
    """In a process just forked: end with the zygote, and be seen under a name."""
    die_with_parent(signal.SIGKILL)
    if os.getppid() != zygote_pid:  # it ended before the line above
        os._exit(1)
    set_process_name(f"varuna-{name}")


def _import_what_workers_need() -> None:
    import numpy  # noqa: F401

    with contextlib.suppress(ImportError):  # it fails again in the user's script, whose traceback then says why
        import torch

        import varuna.session  # noqa: F401

        torch.optim.SGD([torch.zeros(1)])  # the first optimizer of a process imports the compiler's front end
    gc.collect()
    gc.freeze()  # shared pages stay shared: the children's collector does not touch what is older than the fork
    if num_threads() > 1:
        sys.stderr.write(f"varuna: {num_threads()} threads run where workers are forked; that may hang them.\n")


class Zygote:
    """Serves the launcher's requests until its socket ends."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel
        self._names: dict[int, str] = {}  # process id -> name
        self._wakeup, self._wakeup_writer = socket.socketpair()

    def serve(self) -> ForkedJob | None:
        """Run until the launcher is gone (None), or return in a forked child with what it is to do."""
        self._watch_children()
        adopt_orphans()
        die_with_parent(0)
        with selectors.DefaultSelector() as selector:
            selector.register(self._channel.connection, selectors.EVENT_READ)
            selector.register(self._wakeup, selectors.EVENT_READ)
            while self._channel.is_open:
                selector.select()
                for line in self._channel.receive_lines():
                    job = self._handle(line)
                    if job is not None:
                        return job
                self._reap()
        for pid in self._names:
            kill_group(pid, signal.SIGKILL)
        kill_children()
        return None

    def _handle(self, line: bytes) -> ForkedJob | None:
        request = decode_request(line)
        match request:
            case StartStore():
                return self._start_store(request)
            case StartManager():
                return self._start_manager(request)
            case StartProcess():
                return self._start_process(request)
            case SendSignal():
                self._signal(request)
        return None

    def _start_process(self, request: StartProcess) -> ForkedJob | None:
        fds = self._channel.take_fds(request.num_fds)
        if self._fork(request.name) == 0:
            return lambda: _be_worker(request, fds)
        for fd in fds:
            os.close(fd)
        return None

    def _start_manager(self, request: StartManager) -> ForkedJob | None:
        fds = self._channel.take_fds(request.num_fds)
        if self._fork(MANAGER_NAME) == 0:
            return lambda: _be_manager(request, fds)
        for fd in fds:
            os.close(fd)
        return None

    def _start_store(self, request: StartStore) -> ForkedJob | None:
        fds = self._channel.take_fds(request.num_fds)
        if fds:
            listener = socket.socket(fileno=fds[0])
        else:
            listener = socket.create_server((request.host, 0), backlog=_STORE_BACKLOG)
        port = listener.getsockname()[1]
        if self._fork(STORE_NAME) == 0:
            return lambda: _host_store(request.host, listener)
        listener.close()
        self._channel.send(StoreReady(host=request.host, port=port))
        return None

    def _fork(self, name: str) -> int:
        zygote_pid = os.getpid()
        pid = os.fork()
        if pid == 0:
            os.setpgid(0, 0)
            _be_child(name, zygote_pid)
            self._forget()
            return 0
        os.setpgid(pid, pid)  # here too, so that the group exists before anybody signals it
        self._names[pid] = name
        self._channel.send(Started(name=name, pid=pid))
        return pid

    def _forget(self) -> None:
        """In a child: let go of what is the zygote's own."""
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        self._wakeup.close()
        self._wakeup_writer.close()
        self._channel.close()

    def _signal(self, request: SendSignal) -> None:
        for pid, name in self._names.items():
            if name == request.name and request.with_children:
                kill_group(pid, request.signum)
            elif name == request.name:
                os.kill(pid, request.signum)  # not reaped yet, so the number is still this process's

    def _watch_children(self) -> None:
        self._wakeup.setblocking(False)
        self._wakeup_writer.setblocking(False)
        signal.set_wakeup_fd(self._wakeup_writer.fileno(), warn_on_full_buffer=False)
        signal.signal(signal.SIGCHLD, lambda *_: None)

    def _reap(self) -> None:
        """Report processes that ended; what a worker had started ends with it."""
        with contextlib.suppress(BlockingIOError):
            self._wakeup.recv(4096)
        while True:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            name = self._names.pop(pid, None)
            if name is not None:
                kill_group(pid, signal.SIGKILL)
                self._channel.send(Exited(name=name, code=exit_code(status), at_s=time.monotonic()))


def _be_worker(request: StartProcess, fds: list[int]) -> int:
    """In a forked child: a fresh numpy generator, since the fork copied the zygote's to all; then work."""
    import numpy as np

    np.random.seed()
    return run_worker(request, fds)


def _be_manager(request: StartManager, fds: list[int]) -> int:
    """In a forked child: decide who works, until killed."""
    listener, log = fds
    os.environ.update(request.environ)
    for target in (1, 2):
        os.dup2(log, target)
    os.close(log)
    from varuna.morph.__main__ import main as manage

    return manage(["--listen-fd", str(listener), *request.arguments])


def _host_store(host: str, listener: socket.socket) -> int:
    """In a forked child: serve the rendezvous store on the listening socket until killed."""
    from torch.distributed import TCPStore  # type: ignore[attr-defined]

    port = listener.getsockname()[1]
    store = TCPStore(host, port, is_master=True, wait_for_workers=False, master_listen_fd=listener.detach())
    while store.port == port:
        signal.pause()
    return 0
