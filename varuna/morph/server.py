"""The manager's door: WebSockets for workers and agents, HTTP for people. Loopback, unless bound elsewhere.

    GET  /worker?incarnation=NAME     WebSocket; messages as in ``messages.py``
    GET  /agent?machine=NAME[&agent=NAME]  the same for an agent; named like its machine if it is alone there
                 &varuna=V&torch=V    its versions: unlike the job's, it is refused with 403
    GET  /about                       ``About`` as JSON
    GET  /status                      ``Status`` as JSON
    GET  /events[?after=N][&follow=1] ``LoggedEvent``, one JSON object a line
    POST /preempt                     ``PreemptRequest``
    POST /workers                     ``AddRequest``

Every request must bring the job's token (``Authorization: Bearer ...``); without it the answer is 401, whatever
was asked. What cannot be read is answered with an error and changes nothing. A worker that is out is refused
with 410 and the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence

import msgspec
from aiohttp import WSCloseCode, WSMsgType, web
from aiohttp.http_exceptions import HttpProcessingError
from aiohttp.typedefs import Middleware
from msgspec import Struct

from varuna.errors import ProtocolError
from varuna.morph.hub import Connection, Hub
from varuna.morph.link import REASON_HEADER
from varuna.morph.messages import LeaveAsked
from varuna.morph.status import status_of
from varuna.morph.views import About, AddRequest, PreemptRequest
from varuna.versions import UNKNOWN, Versions, installed_versions, refusal_of_versions

MOST_MESSAGE_BYTES = 64 << 20
"""Of a worker's message: a description has the names of all parameters."""

_MOST_BODY_BYTES = 64 << 10
_MOST_NAME_LETTERS = 200
_MOST_WORKERS = 1024
_MOST_SECONDS = 1e9
_CLOSE_S = 1.0
_Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def request_log() -> logging.Logger:
    """Where failures in answering go; what strangers send that is no HTTP is none, and is not written down."""
    logger = logging.getLogger("varuna.morph.server")
    logger.addFilter(_is_ours)
    return logger


def _is_ours(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], HttpProcessingError)


class Server:
    """HTTP and WebSockets around a ``Hub``.

    Args:
        hub: who answers.
        token: the job's; never empty.
        run_id: of the job; empty if agents are not told.
        versions: that agents must have; None for any.
    """

    def __init__(self, hub: Hub, token: str, *, run_id: str = "", versions: Versions | None = None) -> None:
        assert token, "a job without a token"
        self._hub = hub
        self._run_id = run_id
        self._versions = versions
        self._expected = f"Bearer {token}".encode()

    def application(self) -> web.Application:
        """What serves."""
        app = web.Application(middlewares=[self._only_with_token()], client_max_size=_MOST_BODY_BYTES)
        app.router.add_get("/worker", self._worker)
        app.router.add_get("/agent", self._agent)
        app.router.add_get("/about", self._about)
        app.router.add_get("/status", self._status)
        app.router.add_get("/events", self._events)
        app.router.add_post("/preempt", self._preempt)
        app.router.add_post("/workers", self._add_workers)
        app.on_shutdown.append(self._close)
        return app

    async def _close(self, _: web.Application) -> None:
        self._hub.close()

    def _only_with_token(self) -> Middleware:
        @web.middleware
        async def check(request: web.Request, handler: _Handler) -> web.StreamResponse:
            given = request.headers.get("Authorization", "").encode("utf-8", "surrogateescape")
            if not hmac.compare_digest(given, self._expected):
                return _error(401, "the job's token is missing or wrong")
            try:
                return await handler(request)
            except ConnectionResetError:  # whoever asked is gone, before there was an answer
                return _error(400, "you are gone")

        return check

    # --- workers and agents -----------------------------------------------------------------

    async def _worker(self, request: web.Request) -> web.StreamResponse:
        name = request.query.get("incarnation", "")
        if not _is_name(name):
            return _error(400, f"{name[:80]!r} is no name of a worker")
        if refusal := self._hub.refusal_of(name):
            return _error(410, f"{name} is out: {refusal}")
        hub = self._hub
        async with _socket(request) as socket:
            connection = hub.worker_connected(name)
            is_in_order = False
            try:
                is_in_order = await _talk(
                    socket, connection, lambda data: hub.from_worker(name, connection, data)
                )
            finally:
                hub.worker_gone(name, connection, in_order=is_in_order)
            return socket

    async def _agent(self, request: web.Request) -> web.StreamResponse:
        machine = request.query.get("machine", "")
        name = request.query.get("agent", machine)
        if not _is_name(machine) or not _is_name(name):
            return _error(400, f"{machine[:80]!r}, {name[:80]!r}: no name of a machine, or of an agent")
        if refusal := self._refusal_of(request):
            return _error(403, refusal)
        hub = self._hub
        async with _socket(request) as socket:
            connection = hub.agent_connected(name, machine)
            try:
                await _talk(socket, connection, lambda data: hub.from_agent(name, data))
            finally:
                hub.agent_gone(name, connection)
            return socket

    def _refusal_of(self, request: web.Request) -> str:
        """Why an agent may not take part; empty if it may."""
        if self._versions is None:
            return ""
        told = {name: request.query.get(name, UNKNOWN)[:_MOST_NAME_LETTERS] for name in ("varuna", "torch")}
        return refusal_of_versions(Versions(**told), self._versions)

    # --- people -----------------------------------------------------------------------------

    async def _about(self, _: web.Request) -> web.StreamResponse:
        about = About(run_id=self._run_id, versions=self._versions or installed_versions(), unix_s=time.time())
        return _json(msgspec.json.encode(about))

    async def _status(self, _: web.Request) -> web.StreamResponse:
        return _json(msgspec.json.encode(status_of(self._hub)))

    async def _events(self, request: web.Request) -> web.StreamResponse:
        after, follow = request.query.get("after", "0"), request.query.get("follow", "0")
        if not after.isascii() or not after.isdecimal() or len(after) > 15 or follow not in ("0", "1"):
            return _error(400, "after must be a number, and follow 0 or 1")
        response = web.StreamResponse(headers={"Content-Type": "application/x-ndjson"})
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):  # whoever followed is gone
            if follow == "0":
                await response.write(_lines(self._hub.events.after(int(after))))
            else:
                async for events in self._hub.events.follow(int(after)):
                    await response.write(_lines(events))
            await response.write_eof()
        return response

    async def _preempt(self, request: web.Request) -> web.StreamResponse:
        try:
            wanted = msgspec.json.decode(await request.read(), type=PreemptRequest)
            if bool(wanted.worker) == bool(wanted.machine):
                raise ProtocolError("give either a worker or a machine")
            if not 0 <= wanted.deadline_s <= _MOST_SECONDS:
                raise ProtocolError(f"deadline_s={wanted.deadline_s}: give seconds from 0 to {_MOST_SECONDS:g}")
            if not _is_name(wanted.source):
                raise ProtocolError("the source is no name")
            asked = self._hub.ask_to_leave(
                LeaveAsked(
                    incarnation=wanted.worker,
                    machine=wanted.machine,
                    deadline_s=wanted.deadline_s,
                    source=wanted.source,
                )
            )
        except (msgspec.DecodeError, UnicodeError, ProtocolError) as error:
            return _error(400, str(error))
        return _json(msgspec.json.encode({"workers": asked}))

    async def _add_workers(self, request: web.Request) -> web.StreamResponse:
        try:
            wanted = msgspec.json.decode(await request.read(), type=AddRequest)
            if not 1 <= wanted.count <= _MOST_WORKERS:
                raise ProtocolError(f"count={wanted.count}: give a number from 1 to {_MOST_WORKERS}")
            agent = self._hub.add_workers(wanted.count, wanted.machine)
        except (msgspec.DecodeError, UnicodeError, ProtocolError) as error:
            return _error(400, str(error))
        return _json(msgspec.json.encode({"machine": agent}))


@contextlib.asynccontextmanager
async def _socket(request: web.Request) -> AsyncIterator[web.WebSocketResponse]:
    socket = web.WebSocketResponse(timeout=_CLOSE_S, max_msg_size=MOST_MESSAGE_BYTES)
    await socket.prepare(request)
    try:
        yield socket
    finally:
        await socket.close()


async def _talk(
    socket: web.WebSocketResponse, connection: Connection, received: Callable[[bytes], None]
) -> bool:
    """Until either side ends it; whether the other side did, in order."""
    writer = asyncio.ensure_future(_write(socket, connection))
    try:
        async for message in socket:
            if message.type is not WSMsgType.BINARY:
                await socket.close(code=WSCloseCode.UNSUPPORTED_DATA, message=b"messages are binary")
                return False
            try:
                received(message.data)
            except ProtocolError as error:
                await socket.close(code=WSCloseCode.POLICY_VIOLATION, message=str(error).encode()[:120])
                return False
        return socket.close_code == WSCloseCode.OK and not connection.close_reason
    finally:
        writer.cancel()
        with contextlib.suppress(asyncio.CancelledError, ConnectionError):
            await writer


async def _write(socket: web.WebSocketResponse, connection: Connection) -> None:
    while (data := await connection.queue.get()) is not None:
        await socket.send_bytes(data)
    await socket.close(code=WSCloseCode.GOING_AWAY, message=connection.close_reason.encode()[:120])


def _is_name(text: str) -> bool:
    return 0 < len(text) <= _MOST_NAME_LETTERS and text.isprintable()


def _lines(events: Sequence[Struct]) -> bytes:
    return b"".join(msgspec.json.encode(event) + b"\n" for event in events)


def _json(body: bytes) -> web.Response:
    return web.Response(body=body, content_type="application/json")


def _error(status: int, reason: str) -> web.Response:
    reason = " ".join(reason.split())
    body = msgspec.json.encode({"error": reason})
    headers = {REASON_HEADER: reason.encode("ascii", "backslashreplace").decode()}
    return web.Response(status=status, body=body, content_type="application/json", headers=headers)
