"""A worker's or agent's connection to the manager: a thread that keeps it up, whatever the rest does.

    link = Link(url, token, {"incarnation": "w3"}, received=on_message, greeting=lambda: [state])
    link.send(data)          # from any thread, never blocks
    link.close()             # sends what is queued, then ends

The manager may die and come back: the link connects again, first tells again what its owner's state is
(``greeting``), then goes on with what was queued. What was sent just before a break may arrive twice or, if it
is no part of the state, not at all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
from collections.abc import Callable, Mapping, Sequence

import aiohttp

_RETRY_S = (0.05, 0.1, 0.2, 0.5, 1.0)
"""Waits between attempts to connect; the last one is repeated."""

_CLOSE_WAIT_S = 2.0


class Link:
    """One connection.

    Args:
        url: of the manager's socket: ``http://host:port/worker``.
        token: the job's.
        query: who this is, as query parameters.
        received: called in the link's thread with each message.
        greeting: messages that tell the manager this side's state, after each connect; called in the thread.
        beat: a message to send every ``beat_s`` seconds.
        beat_s: see ``beat``; 0 for never.
    """

    def __init__(
        self,
        url: str,
        token: str,
        query: Mapping[str, str],
        *,
        received: Callable[[bytes], None],
        greeting: Callable[[], Sequence[bytes]],
        beat: bytes = b"",
        beat_s: float = 0.0,
    ) -> None:
        self._url = url
        self._token = token
        self._query = dict(query)
        self._received = received
        self._greeting = greeting
        self._beat = beat
        self._beat_s = beat_s
        self._loop = asyncio.new_event_loop()
        self._queue: asyncio.Queue[bytes | None] = asyncio.Queue()
        self._is_refused = ""
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._run, name="varuna-link", daemon=True)
        self._owner_pid = os.getpid()
        self._thread.start()

    @property
    def refused(self) -> str:
        """Why the manager does not want this side any more; empty while it does."""
        return self._is_refused

    def send(self, data: bytes) -> None:
        """Queue a message."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the job is over
            self._loop.call_soon_threadsafe(self._queue.put_nowait, data)

    def close(self) -> None:
        """Send what is queued, if the manager is there, and end the thread. Idempotent."""
        if os.getpid() != self._owner_pid or self._loop.is_closed():
            return
        self._closing.set()
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._queue.put_nowait, None)
        self._thread.join(_CLOSE_WAIT_S)

    # --- the thread -------------------------------------------------------------------------

    def _run(self) -> None:
        try:
            self._loop.run_until_complete(self._keep_up())
        finally:
            self._loop.close()

    async def _keep_up(self) -> None:
        headers = {"Authorization": f"Bearer {self._token}"}
        attempt = 0
        async with aiohttp.ClientSession(headers=headers, trust_env=False) as session:
            while not self._is_refused:
                try:
                    async with session.ws_connect(self._url, params=self._query, max_msg_size=0) as socket:
                        attempt = 0
                        if await self._talk(socket):
                            return
                except aiohttp.WSServerHandshakeError as error:
                    if error.status in (401, 403, 410):
                        self._is_refused = error.headers.get("X-Varuna-Reason", "") if error.headers else ""
                        self._is_refused = self._is_refused or f"HTTP status {error.status}"
                        return
                except (aiohttp.ClientError, OSError):
                    pass  # the manager is away; it may come back
                if self._closing.is_set():
                    return  # nobody to tell
                await asyncio.sleep(_RETRY_S[min(attempt, len(_RETRY_S) - 1)])
                attempt += 1

    async def _talk(self, socket: aiohttp.ClientWebSocketResponse) -> bool:
        """Send and receive until the connection breaks (False) or the owner closes the link (True)."""
        for data in self._greeting():
            await socket.send_bytes(data)
        reader = asyncio.ensure_future(self._read(socket))
        writer = asyncio.ensure_future(self._write(socket))
        try:
            await asyncio.wait((reader, writer), return_when=asyncio.FIRST_COMPLETED)
            return writer.done() and not writer.cancelled() and writer.exception() is None
        finally:
            for task in (reader, writer):
                task.cancel()
                with contextlib.suppress(asyncio.CancelledError, aiohttp.ClientError, OSError):
                    await task

    async def _read(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        async for message in socket:
            if message.type == aiohttp.WSMsgType.BINARY:
                await asyncio.to_thread(self._received, message.data)

    async def _write(self, socket: aiohttp.ClientWebSocketResponse) -> None:
        while True:
            try:
                data = await asyncio.wait_for(self._queue.get(), self._beat_s or None)
            except TimeoutError:
                data = self._beat
            if data is None:
                await socket.close()
                return
            await socket.send_bytes(data)
