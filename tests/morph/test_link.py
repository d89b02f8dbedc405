"""Links against real servers that come, go and refuse."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from aiohttp import WSMsgType, web

from tests.launch.jobs import wait_until
from tests.morph.serving import Place, place
from varuna.morph.link import REASON_HEADER, Link, Refusal

TIMEOUT_S = 60


@pytest.fixture
def at() -> Iterator[Place]:
    with place() as found:
        yield found


class Echo:
    """Keeps what comes, and can send and cut."""

    def __init__(self) -> None:
        self.got: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.requests: list[web.Request] = []
        self.sockets: list[web.WebSocketResponse] = []
        self.close_codes: list[int | None] = []

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/worker", self.handle)
        return app

    async def handle(self, request: web.Request) -> web.WebSocketResponse:
        socket = web.WebSocketResponse()
        self.requests.append(request)
        await socket.prepare(request)
        self.sockets.append(socket)
        async for message in socket:
            assert message.type is WSMsgType.BINARY
            self.got.put(message.data)
        self.close_codes.append(socket.close_code)
        return socket

    def next(self) -> bytes:
        return self.got.get(timeout=TIMEOUT_S)


def link_to(at: Place, **options: Any) -> Link:
    arguments: dict[str, Any] = {"received": lambda _: None, "greeting": list}
    return Link(f"{at.url}/worker", "a-token", {"incarnation": "w 1&2"}, **{**arguments, **options})


def test_it_says_who_it_is_greets_and_sends_in_order(at: Place) -> None:
    echo = Echo()
    at.serve(echo.app())
    link = link_to(at, greeting=lambda: [b"hello"])
    for number in range(20):
        link.send(str(number).encode())
    assert echo.next() == b"hello"
    assert [echo.next() for _ in range(20)] == [str(number).encode() for number in range(20)]
    assert echo.requests[0].headers["Authorization"] == "Bearer a-token"
    assert echo.requests[0].query["incarnation"] == "w 1&2"
    link.close()
    wait_until(lambda: echo.close_codes == [1000], TIMEOUT_S, "the link says that it ends")


def test_it_waits_for_a_server_that_is_not_there_yet(at: Place) -> None:
    echo = Echo()
    link = link_to(at)
    link.send(b"early")
    at.serve(echo.app())
    assert echo.next() == b"early"
    link.close()


def test_it_comes_back_tells_its_state_first_and_then_what_was_queued(at: Place) -> None:
    first, second = Echo(), Echo()
    at.serve(first.app())
    state = [b"state 1"]
    link = link_to(at, greeting=lambda: state)
    assert first.next() == b"state 1"
    at.end()
    wait_until(lambda: not link.is_connected, TIMEOUT_S, "the link sees that nobody is there")
    state[:] = [b"state 2"]
    link.send(b"while nobody was there")
    at.serve(second.app())
    assert second.next() == b"state 2"
    assert second.next() == b"while nobody was there"
    link.close()


def test_messages_come_in_order_and_a_slow_reader_does_not_stop_the_beats(at: Place) -> None:
    echo = Echo()
    at.serve(echo.app())
    received: list[bytes] = []
    go_on = threading.Event()

    def slow(data: bytes) -> None:
        received.append(data)
        go_on.wait(TIMEOUT_S)

    link = link_to(at, received=slow, beat=b"beat", beat_s=0.02)
    assert echo.next() == b"beat"
    for number in range(5):
        at.loop.run(echo.sockets[0].send_bytes(str(number).encode()))
    wait_until(lambda: received, TIMEOUT_S, "the first message")
    for _ in range(echo.got.qsize() + 3):
        assert echo.next() == b"beat"
    assert received == [b"0"]
    go_on.set()
    wait_until(lambda: len(received) == 5, TIMEOUT_S, "the others")
    assert received == [b"0", b"1", b"2", b"3", b"4"]
    link.close()


@pytest.mark.parametrize("status", [401, 410])
def test_a_refusal_ends_it_and_is_told_once(at: Place, status: int) -> None:
    async def refuse(_: web.Request) -> web.Response:
        return web.Response(status=status, headers={REASON_HEADER: "it is out"})

    app = web.Application()
    app.router.add_get("/worker", refuse)
    at.serve(app)
    told: queue.SimpleQueue[Refusal] = queue.SimpleQueue()
    link = link_to(at, refused=told.put)
    assert told.get(timeout=TIMEOUT_S) == Refusal(status=status, reason="it is out")
    assert link.refusal == Refusal(status=status, reason="it is out")
    link.close()
    assert told.empty()


def test_trouble_of_the_server_is_no_refusal(at: Place) -> None:
    answers = iter([503, 500])
    echo = Echo()

    async def first_trouble(request: web.Request) -> web.StreamResponse:
        status = next(answers, None)
        return await echo.handle(request) if status is None else web.Response(status=status)

    app = web.Application()
    app.router.add_get("/worker", first_trouble)
    at.serve(app)
    link = link_to(at, greeting=lambda: [b"in the end"])
    assert echo.next() == b"in the end"
    assert link.refusal is None
    link.close()


def test_closing_waits_for_a_server_that_comes_and_not_for_one_that_does_not(at: Place) -> None:
    echo = Echo()
    link = link_to(at)
    link.send(b"last words")
    closing = threading.Thread(target=link.close)
    closing.start()
    at.serve(echo.app())
    assert echo.next() == b"last words"
    closing.join(TIMEOUT_S)
    assert not closing.is_alive()
    at.end()
    hopeless = link_to(at)
    hopeless.send(b"nobody hears")
    hopeless.close(patience_s=0.0)
    hopeless.close()  # again is no error
    hopeless.send(b"nor that")
