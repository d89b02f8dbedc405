"""What the launcher and the zygote say to each other: JSON lines over a Unix stream socket.

The launcher asks (``StartStore``, ``StartManager``, ``StartProcess``, ``SendSignal``), the zygote reports
(``Ready``, ``StoreReady``, ``Started``, ``Exited``). File descriptors travel beside a message, which says how
many are its own. Either side takes the other's end of stream as the order to end. Standard library and msgspec
only.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence
from typing import Literal

import msgspec

from varuna.failure import FailureRecord

_READ_BYTES = 65536
_MAX_FDS = 64


class StartStore(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a process that hosts the rendezvous store on ``host``.

    Descriptors: none, for any free port; or the socket that it listens on.
    """

    host: str
    num_fds: int = 0


class StartProcess(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork a worker.

    Descriptors: standard input, output, error, the pipe for ``WorkerNotice`` lines, a pipe that ends when the
    launcher begins to end the job; then, for a worker that may become worker 0, what are to be its standard
    streams when it does.

    Attributes:
        name: what reports call it; unique among the living.
        worker_index: its number on this machine, for its failure record.
        target: path of a script, or name of a module.
        is_module: which of the two ``target`` is.
        arguments: what the script finds in ``sys.argv[1:]``.
        environ: variables set on top of the zygote's own.
        failure_dir: where it leaves a failure record.
    """

    name: str
    worker_index: int
    target: str
    is_module: bool
    arguments: list[str]
    environ: dict[str, str]
    failure_dir: str
    num_fds: int = 5


class StartManager(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Fork the job's manager. Descriptors: the socket that it listens on, and where its standard error goes.

    Attributes:
        environ: variables set on top of the zygote's own.
        arguments: its command line, as for ``python -m varuna.morph``, but for the socket.
    """

    environ: dict[str, str]
    arguments: list[str]
    num_fds: int = 2


class SendSignal(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """Signal a worker, or also every process it has started. One that is gone already is no error."""

    name: str
    signum: int
    with_children: bool = False


class Ready(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The zygote has its imports and waits for requests."""

    import_s: float


class StoreReady(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """The store listens."""

    host: str
    port: int


class Started(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker or the manager was forked; its process id is its process group too."""

    name: str
    pid: int


class Exited(msgspec.Struct, frozen=True, kw_only=True, tag=True):
    """A worker, the store or the manager (names "store", "manager") is gone and so is all that it started.

    ``code`` is the exit code, or minus the number of the signal that ended it; ``at_s`` on the monotonic clock.
    """

    name: str
    code: int
    at_s: float


class WorkerNotice(msgspec.Struct, frozen=True, kw_only=True):
    """One line that a worker writes to the launcher's pipe.

    Attributes:
        worker_index: who writes.
        what: user code begins, a failure record was left, or it got SIGTERM from somebody else.
        at_s: when, on the monotonic clock.
        record: of the failure, shortened, if it could not be left where it should be.
    """

    worker_index: int
    what: Literal["begins", "failed", "terminate"]
    at_s: float
    record: FailureRecord | None = None


Request = StartStore | StartManager | StartProcess | SendSignal
Report = Ready | StoreReady | Started | Exited


class Channel:
    """One end of the socket: sends whole messages, gives the complete ones that have arrived.

    Reading never blocks; writing may, for as long as the other side does not read.
    """

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self.is_open = True
        self._buffer = b""
        self._fds: list[int] = []

    def send(self, message: msgspec.Struct, fds: Sequence[int] = ()) -> None:
        """Send one message with its descriptors; the sender keeps its own copies.

        To a side that is gone nothing is sent, and ``is_open`` turns False.
        """
        data = msgspec.json.encode(message) + b"\n"
        self.connection.setblocking(True)
        try:
            sent = socket.send_fds(self.connection, [data], list(fds)) if fds else 0
            self.connection.sendall(data[sent:])
        except ConnectionError:
            self.is_open = False

    def receive_lines(self) -> list[bytes]:
        """Complete lines that have arrived; ``is_open`` turns False at the other side's end of stream."""
        self.connection.setblocking(False)
        while True:
            try:
                data, fds, _, _ = socket.recv_fds(self.connection, _READ_BYTES, _MAX_FDS)
            except BlockingIOError:
                break
            except ConnectionError:
                data, fds = b"", []
            self._fds.extend(fds)
            if not data:
                self.is_open = False
                break
            self._buffer += data
        *lines, self._buffer = self._buffer.split(b"\n")
        return lines

    def take_fds(self, count: int) -> list[int]:
        """The next descriptors, in the order sent; the caller closes them."""
        taken, self._fds = self._fds[:count], self._fds[count:]
        return taken

    def close(self) -> None:
        """Close the socket; the other side sees the end of stream."""
        self.is_open = False
        self.connection.close()


def decode_request(line: bytes) -> Request:
    """A request from its line."""
    return msgspec.json.decode(line, type=Request)


def decode_report(line: bytes) -> Report:
    """A report from its line."""
    return msgspec.json.decode(line, type=Report)
