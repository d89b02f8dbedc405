"""A worker's or agent's connection to the manager: a thread that keeps it up, whatever the rest does.

    link = Link(url, token, {"incarnation": "w3"}, received=on_message, greeting=lambda: [state])
    link.send(data)          # from any thread, never blocks
    link.close()             # sends what is queued, then ends; happens by itself when the process ends

The manager may die and come back: the link connects again, first tells again what its owner's state is
(``greeting``), then goes on with what was queued. What was sent just before a break may arrive twice or, if it
is no part of the state, not at all. A manager that does not want this side says so once (``Refusal``); the link
then ends.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import logging
import os
import queue
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import aiohttp

from varuna.errors import ProtocolError

_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to connect; the last one is repeated."""

_STEADY_S = 1.0
"""A connection that held for so long makes the waits begin anew."""

_FLUSH_S = 2.0
"""How long ``close`` lets a connection send what is queued."""

PATIENCE_S = 5.0
"""How long ``close`` waits by default for a manager that is just being started again."""

_PING_S = 10.0
"""A connection on which the other side does not answer a ping this often is made anew."""

_log = logging.getLogger("varuna.morph")

_REFUSALS = (401, 403, 404, 410)
REASON_HEADER = "X-Varuna-Reason"


@dataclass(frozen=True, kw_only=True)
class Refusal:
    """The manager does not want this side.

    Attributes:
        status: 401: wrong token; 410: this incarnation is out; others: it is no manager of this job; 0: it said
            something that is none of Varuna's messages.
        reason: for people.
    """

    status: int
    reason: str


class Link:
    """One connection.

    Args:
        url: of the manager's socket: ``http://host:port/worker``; or what says so at each attempt, or raises
            ``OSError`` if nobody knows for now.
        token: the job's.
        query: who this is, as query parameters.
        received: called with each message, one after another, in a thread of its own; it may take its time.
        greeting: messages that tell the manager this side's state, after each connect; called in the thread.
        refused: called once, as ``received``, if the manager does not want this side.
        beat: a message to send where nothing else was sent for ``beat_s`` seconds.
        beat_s: see ``beat``; 0 for never.
    """

    def __init__(
        self,
        url: str | Callable[[], str],
        token: str,
        query: Mapping[str, str],
        *,
        received: Callable[[bytes], None],
        greeting: Callable[[], Sequence[bytes]],
        refused: Callable[[Refusal], None] = lambda _: None,
        beat: bytes = b"",
        beat_s: float = 0.0,
    ) -> None:
        self._url: Callable[[], str] = (lambda: url) if isinstance(url, str) else url
        self._token = token
        self._query = dict(query)
        self._received = received
        self._greeting = greeting
        self._refused = refused
        self._beat = beat
        self._beat_s = beat_s
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._closing = asyncio.Event()
        self._is_connected = asyncio.Event()
        self._unsent: bytes | None = None
        self._is_last = False  # all was sent, the connection is being closed
        self._patience_s = PATIENCE_S
        self._refusal: Refusal | None = None
        self._inbox: queue.SimpleQueue[bytes | Refusal | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="varuna-link", daemon=True)
        self._taker = threading.Thread(target=self._take, name="varuna-orders", daemon=True)
        self._owner_pid = os.getpid()
        self._thread.start()
        self._taker.start()
        atexit.register(self.close)

    @property
    def is_connected(self) -> bool:
        """Whether the manager is there."""
        return self._is_connected.is_set()

    @property
    def refusal(self) -> Refusal | None:
        """Why the manager does not want this side any more; None while it does."""
        return self._refusal

    def send(self, data: bytes) -> None:
        """Queue a message."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            self._loop.call_soon_threadsafe(self._queue.put_nowait, data)

    def close(self, patience_s: float = PATIENCE_S) -> None:
        """Send what is queued, to a manager that is there within ``patience_s``; end the thread. Idempotent."""
        if os.getpid() != self._owner_pid:  # a fork's copy
            return
        atexit.unregister(self.close)
        self._patience_s = patience_s
        with contextlib.suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
            self._loop.call_soon_threadsafe(self._closing.set)
        self._thread.join(patience_s + _FLUSH_S + 1.0)
        if threading.current_thread() is not self._taker:
            self._taker.join(_FLUSH_S)

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._until_closed())
        finally:
            self._loop.close()
            if self._refusal is not None:
                self._inbox.put(self._refusal)
            self._inbox.put(None)

    def _take(self) -> None:
        """The other thread: what has come is told, in order."""
        while (item := self._inbox.get()) is not None:
            try:
                if isinstance(item, Refusal):
                    self._refused(item)
                else:
                    self._received(item)
            except Exception as error:  # a thread that ended here would leave its owner waiting for ever
                reason = f"what it says cannot be read: {error}"
                if not isinstance(error, ProtocolError):
                    _log.exception("What the manager said could not be done.")
                    reason = f"what it says could not be done here: {error!r}"
                if not isinstance(item, Refusal):
                    self._inbox.put(Refusal(status=0, reason=reason))

    async def _until_closed(self) -> None:
        work = asyncio.ensure_future(self._keep_up())
        closing = asyncio.ensure_future(self._closing.wait())
        try:
            await asyncio.wait((work, closing), return_when=asyncio.FIRST_COMPLETED)
            if not work.done() and not self._is_connected.is_set():
                connecting = asyncio.ensure_future(self._is_connected.wait())
                await asyncio.wait(
                    (work, connecting), timeout=self._patience_s, return_when=asyncio.FIRST_COMPLETED
                )
                connecting.cancel()
            if self._is_connected.is_set():
                await asyncio.wait((work,), timeout=_FLUSH_S)
        finally:
            for task in (work, closing):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError):
                    await task

    async def _keep_up(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        attempt = 0
        async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
            while True:
                started_s = time.monotonic()
                try:
                    if await self._connect_and_talk(session):
                        return
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in _REFUSALS:
                        told = error.headers.get(REASON_HEADER, "") if error.headers else ""
                        self._refusal = Refusal(
                            status=error.status, reason=told or f"HTTP status {error.status}"
                        )
                        return
                except (aiohttp.ClientError, OSError, TimeoutError):
                    pass  # the manager is away; it may come back
                finally:
                    self._is_connected.clear()
                attempt = 0 if time.monotonic() - started_s > _STEADY_S else attempt
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                attempt += 1

    async def _connect_and_talk(self, session: aiohttp.ClientSession) -> bool:
        """Send and receive until the connection breaks (False) or the owner closes the link (True)."""
        async with session.ws_connect(
            self._url(), params=self._query, max_msg_size=0, heartbeat=_PING_S
        ) as socket:
            greeting = self._greeting()
            self._is_connected.set()
            for data in greeting:
                await socket.send_bytes(data)
            reader = asyncio.ensure_future(self._read(socket))
            writer = asyncio.ensure_future(self._write(socket))
            try:
                await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
                if self._is_last:  # closing ends the reader, too
                    await asyncio.wait((writer,))
                return self._is_last
            finally:
                for task in (reader, writer):
                    task.cancel()
                    with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                        await task

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                self._inbox.put(message.data)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            if self._unsent is not None:  # the connection broke under it; it may arrive twice
                await socket.send_bytes(self._unsent)
                self._unsent = None
            try:
                data = await asyncio.wait_for(self._queue.get(), self._beat_s or None)
            except TimeoutError:
                await socket.send_bytes(self._beat)
                continue
            if data is None:
                self._is_last = True
                await socket.close()
                return
            self._unsent = data
