"""How neighbouring stages find each other and make sure of it: addresses in the store, a hello on each stream.

A stage listens on one port for its previous stage and publishes the address under the generation; it connects
twice to its next stage, once per direction. Every connection starts with a hello (generation, ranks, direction,
and a digest of the job's token); the listener answers with its own digest, or closes. A connection of another
job, of an earlier generation or of a stranger never carries a message, and a silent stranger holds nobody up.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import selectors
import socket
import struct
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from varuna.errors import PeerLost, ProtocolError
from varuna.run.address import route_to
from varuna.run.wire import WIRE_VERSION, Direction

_HELLO = struct.Struct("!4sBBxxqII32s")
_WELCOME = struct.Struct("!4sqI32s")
_HELLO_MAGIC = b"VRNH"
_WELCOME_MAGIC = b"VRNW"
_DIRECTION_CODES = {Direction.ACTIVATION: 1, Direction.GRADIENT: 2}
_POLL_S = 0.2  # how soon a cancelled connect ends
_FIRST_DELAY_S, _LAST_DELAY_S = 0.002, 0.05  # between two looks for an address in the store
_MAX_PENDING = 64

_T = TypeVar("_T")
_log = logging.getLogger("varuna.run")


@dataclass(frozen=True, kw_only=True)
class Peer:
    """A neighbour: the worker's rank, its stage and its address, for errors."""

    rank: int
    stage_index: int
    address: str

    def __str__(self) -> str:
        return f"Worker {self.rank} (stage {self.stage_index}, {self.address})"


@dataclass(frozen=True, kw_only=True)
class Link:
    """One connected, accepted stream and who is at its other end."""

    stream: socket.socket
    peer: Peer


@dataclass(frozen=True, kw_only=True)
class StageAddress:
    """Where this worker stands: its rank and stage, and its neighbours' ranks (None at the ends)."""

    rank: int
    stage_index: int
    previous_rank: int | None
    next_rank: int | None


@dataclass(frozen=True, kw_only=True)
class ConnectOptions:
    """How connections are made.

    Attributes:
        generation: membership and plan; connections of another are refused.
        token: secret of the job, the same on all workers.
        host: address to listen on (``World.address``); "" means the one from which the store is reached.
        timeout_s: after which a neighbour that did not appear is ``PeerLost``.
        cancelled: set it to make the attempt end early (within 0.2 s).
    """

    generation: int
    token: bytes
    host: str = ""
    timeout_s: float = 60.0
    cancelled: threading.Event = field(default_factory=threading.Event)


@dataclass(frozen=True, kw_only=True)
class Links:
    """Streams to the neighbours by direction of the messages on them."""

    previous: dict[Direction, Link]
    next: dict[Direction, Link]


def connect_neighbours(store: Store, place: StageAddress, options: ConnectOptions) -> Links:
    """Connect to both neighbours. All stages of a pipeline call it at about the same time.

    Raises:
        PeerLost: a neighbour did not appear in time, or the attempt was cancelled.
        ProtocolError: a neighbour refused this worker.
    """
    return _Connecting(store, place, options).run()


def address_facing(store: Store) -> str:
    """This machine's address on the way to the store's host; loopback if the store is local."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return route_to(store.host, store.port) if isinstance(store, TCPStore) else "127.0.0.1"


class _Connecting:
    """One attempt; owns every socket until it hands them over."""

    def __init__(self, store: Store, place: StageAddress, options: ConnectOptions) -> None:
        self.store = store
        self.place = place
        self.options = options
        self.deadline_s = time.monotonic() + options.timeout_s
        self.owned: list[socket.socket] = []

    def run(self) -> Links:
        listener: socket.socket | None = None
        try:
            if self.place.previous_rank is not None:
                listener = self._listen()
            to_next = {} if self.place.next_rank is None else self._connect(self.place.next_rank)
            previous: dict[Direction, Link] = {}
            if listener is not None:
                previous = _Accepting(self, listener).run()
            for link in to_next.values():
                self._check_welcome(link)
            for link in (*previous.values(), *to_next.values()):
                link.stream.setblocking(True)
                link.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        except BaseException:
            for stream in self.owned:
                stream.close()
            raise
        finally:
            if listener is not None:
                listener.close()
        return Links(previous=previous, next=to_next)

    def _key(self, rank: int) -> str:
        return f"channels/{self.options.generation}/{rank}"

    def _listen(self) -> socket.socket:
        host = self.options.host or address_facing(self.store)
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_MAX_PENDING)
        try:
            listener.setblocking(False)
            port = listener.getsockname()[1]
            self.store.set(self._key(self.place.rank), f"{host}|{port}")
        except BaseException:
            listener.close()
            raise
        return listener

    def _connect(self, rank: int) -> dict[Direction, Link]:
        host, _, port = self._lookup(rank).rpartition("|")
        peer = Peer(rank=rank, stage_index=self.place.stage_index + 1, address=f"{host}:{port}")
        links = {}
        for direction in Direction:
            stream = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
            self.owned.append(stream)
            stream.setblocking(False)
            try:
                stream.connect((host, int(port)))
            except BlockingIOError:
                self._wait_for(stream, selectors.EVENT_WRITE, peer)
            except OSError as error:
                raise PeerLost(f"{peer} cannot be reached: {error}.") from error
            error_number = stream.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
            if error_number:
                raise PeerLost(f"{peer} cannot be reached: {OSError(error_number, '')}.")
            self._send_small(stream, self._hello(rank, direction), peer)
            links[direction] = Link(stream=stream, peer=peer)
        return links

    def _lookup(self, rank: int) -> str:
        """The published address of a worker. Asked again and again: a wait in the store cannot be cancelled."""
        key = self._key(rank)
        delay_s = _FIRST_DELAY_S
        while not self.store.check([key]):
            self.check_time(f"worker {rank} (stage {self.place.stage_index + 1}) to publish its address")
            self.options.cancelled.wait(delay_s)
            delay_s = min(2 * delay_s, _LAST_DELAY_S)
        return bytes(self.store.get(key)).decode()

    def _hello(self, to_rank: int, direction: Direction) -> bytes:
        return _HELLO.pack(
            _HELLO_MAGIC,
            WIRE_VERSION,
            _DIRECTION_CODES[direction],
            self.options.generation,
            self.place.rank,
            to_rank,
            self.digest(b"hello"),
        )

    def digest(self, purpose: bytes) -> bytes:
        """What proves knowledge of the token; differs by purpose, so that a hello cannot be echoed back."""
        return hmac.digest(self.options.token, purpose, hashlib.sha256)

    def welcome(self) -> bytes:
        """The answer to an accepted hello."""
        return _WELCOME.pack(_WELCOME_MAGIC, self.options.generation, self.place.rank, self.digest(b"welcome"))

    def _check_welcome(self, link: Link) -> None:
        answer = b""
        while len(answer) < _WELCOME.size:
            self._wait_for(link.stream, selectors.EVENT_READ, link.peer)
            data = _attempt(link.peer, partial(link.stream.recv, _WELCOME.size - len(answer)))
            if not data:
                raise ProtocolError(
                    f"{link.peer} refused the connection of worker {self.place.rank}, generation "
                    f"{self.options.generation}. Its own log says why."
                )
            answer += data
        magic, generation, rank, digest = _WELCOME.unpack(answer)
        if (
            magic != _WELCOME_MAGIC
            or generation != self.options.generation
            or rank != link.peer.rank
            or not hmac.compare_digest(digest, self.digest(b"welcome"))
        ):
            raise ProtocolError(
                f"{link.peer} answered as worker {rank} of generation {generation}; expected generation "
                f"{self.options.generation} of the same job."
            )

    def _send_small(self, stream: socket.socket, data: bytes, peer: Peer) -> None:
        sent = _attempt(peer, lambda: stream.send(data))
        assert sent == len(data), "a new stream has room for a hello"

    def _wait_for(self, stream: socket.socket, event: int, peer: Peer) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(stream, event)
            while not selector.select(_POLL_S):
                self.check_time(f"{peer} to answer")

    def check_time(self, awaited: str) -> None:
        """Raise ``PeerLost`` if the attempt was cancelled or is out of time."""
        if self.options.cancelled.is_set():
            raise PeerLost(f"Worker {self.place.rank} stopped waiting for {awaited}: cancelled.")
        if time.monotonic() > self.deadline_s:
            raise PeerLost(
                f"Worker {self.place.rank} waited {self.options.timeout_s:.0f} s for {awaited} in generation "
                f"{self.options.generation}. Check that it runs and that its port can be reached."
            )


class _Accepting:
    """Waits on the listener for both connections of the previous stage; refuses all others."""

    def __init__(self, attempt: _Connecting, listener: socket.socket) -> None:
        self.attempt = attempt
        self.listener = listener
        self.accepted: dict[Direction, Link] = {}
        self.pending: dict[socket.socket, bytes] = {}

    def run(self) -> dict[Direction, Link]:
        rank = self.attempt.place.previous_rank
        stage_index = self.attempt.place.stage_index - 1
        with selectors.DefaultSelector() as selector:
            selector.register(self.listener, selectors.EVENT_READ)
            try:
                while len(self.accepted) < len(Direction):
                    self.attempt.check_time(f"worker {rank} (stage {stage_index}) to connect")
                    for key, _ in selector.select(_POLL_S):
                        if key.fileobj is self.listener:
                            self._accept(selector)
                        elif isinstance(key.fileobj, socket.socket):
                            self._read(selector, key.fileobj)
            finally:
                for stream in self.pending:
                    stream.close()
        return self.accepted

    def _accept(self, selector: selectors.BaseSelector) -> None:
        stream, _ = self.listener.accept()
        if len(self.pending) >= _MAX_PENDING:  # strangers that say nothing: the oldest goes
            oldest = next(iter(self.pending))
            self._refuse(selector, oldest, "it said nothing")
        stream.setblocking(False)
        self.pending[stream] = b""
        selector.register(stream, selectors.EVENT_READ)

    def _read(self, selector: selectors.BaseSelector, stream: socket.socket) -> None:
        try:
            data = stream.recv(_HELLO.size - len(self.pending[stream]))
        except OSError as error:
            self._refuse(selector, stream, str(error))
            return
        if not data:
            self._refuse(selector, stream, "it closed before its hello")
            return
        hello = self.pending[stream] = self.pending[stream] + data
        if len(hello) < _HELLO.size:
            return
        reason = self._why_refused(hello)
        if reason:
            self._refuse(selector, stream, reason)
            return
        selector.unregister(stream)
        del self.pending[stream]
        self._keep(stream, hello)

    def _why_refused(self, hello: bytes) -> str:
        """Empty if the hello is the previous stage's."""
        place, options = self.attempt.place, self.attempt.options
        magic, version, code, generation, from_rank, to_rank, digest = _HELLO.unpack(hello)
        if magic != _HELLO_MAGIC or not hmac.compare_digest(digest, self.attempt.digest(b"hello")):
            return "it is not of this job"
        if version != WIRE_VERSION:
            return f"it runs wire version {version}, this worker {WIRE_VERSION}"
        if generation != options.generation:
            return f"it is of generation {generation}, this worker of {options.generation}"
        if to_rank != place.rank or from_rank != place.previous_rank:
            return f"worker {from_rank} looks for {to_rank}; this is {place.rank}, after {place.previous_rank}"
        if code not in _DIRECTION_CODES.values() or _direction(code) in self.accepted:
            return f"direction {code} is unknown or connected already"
        return ""

    def _keep(self, stream: socket.socket, hello: bytes) -> None:
        place = self.attempt.place
        host, port = stream.getpeername()[:2]
        assert place.previous_rank is not None
        peer = Peer(rank=place.previous_rank, stage_index=place.stage_index - 1, address=f"{host}:{port}")
        self.attempt.owned.append(stream)
        self.attempt._send_small(stream, self.attempt.welcome(), peer)
        self.accepted[_direction(hello[5])] = Link(stream=stream, peer=peer)

    def _refuse(self, selector: selectors.BaseSelector, stream: socket.socket, reason: str) -> None:
        _log.warning("Refused a connection: %s.", reason)
        selector.unregister(stream)
        del self.pending[stream]
        stream.close()


def _direction(code: int) -> Direction:
    return next(direction for direction, known in _DIRECTION_CODES.items() if known == code)


def _attempt(peer: Peer, work: Callable[[], _T]) -> _T:
    """Use a stream of ``peer``; a broken one is ``PeerLost``."""
    try:
        return work()
    except OSError as error:
        raise PeerLost(f"{peer} broke the connection while it was made: {error}.") from error
