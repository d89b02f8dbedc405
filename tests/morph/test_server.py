"""The manager's door: who gets in, what is answered, and that nothing malformed changes anything."""

from __future__ import annotations

import asyncio
import http.client
import json
import pickle
import queue
from collections.abc import Iterator
from typing import Any
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.launch.jobs import wait_until
from tests.morph.serving import TOKEN, Place, ServedManager, place
from varuna.morph.link import Link, Refusal
from varuna.morph.messages import (
    Beat,
    LeaveAsked,
    Ready,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerStarted,
    decode_to_agent,
    encode,
)
from varuna.morph.views import Status

TIMEOUT_S = 60
GOOD = {"Authorization": f"Bearer {TOKEN}"}
PICKLE = pickle.dumps({"worker": "vm.0.a"})


@pytest.fixture
def at() -> Iterator[Place]:
    with place() as found:
        yield found


@pytest.fixture
def served(at: Place) -> ServedManager:
    """A manager that knows one agent and two workers."""
    return ServedManager(at)


class Agent:
    """A real link, as an agent has one."""

    def __init__(self, at: Place, machine: str = "vm", *workers: str) -> None:
        self.got: queue.SimpleQueue[Any] = queue.SimpleQueue()
        started = [WorkerStarted(incarnation=name, machine=machine, rank=None) for name in workers]
        self.link = Link(
            f"{at.url}/agent",
            TOKEN,
            {"machine": machine},
            received=lambda data: self.got.put(decode_to_agent(data)),
            greeting=lambda: [encode(message) for message in started],
        )

    def next(self) -> Any:
        return self.got.get(timeout=TIMEOUT_S)


def ask(
    at: Place, method: str, path: str, body: bytes = b"", headers: dict[str, str] = GOOD
) -> tuple[int, bytes]:
    """Status and body of an answer."""
    address = urlsplit(at.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    try:
        connection.request(method, path, body=body or None, headers=headers)
        response = connection.getresponse()
        return response.status, response.read()
    finally:
        connection.close()


def state(served: ServedManager) -> bytes:
    """All that the manager knows."""
    return served.at.loop.call(lambda: msgspec.json.encode(served.manager.job))


def status(at: Place) -> Status:
    code, body = ask(at, "GET", "/status")
    assert code == 200
    return msgspec.json.decode(body, type=Status)


# --- who gets in ----------------------------------------------------------------------------

ROUTES = [
    ("GET", "/status"),
    ("GET", "/events"),
    ("GET", "/events?follow=1"),
    ("POST", "/preempt"),
    ("POST", "/workers"),
    ("GET", "/worker?incarnation=vm.0.a"),
    ("GET", "/agent?machine=vm"),
    ("GET", "/"),
    ("GET", "/nothing"),
    ("DELETE", "/status"),
]


@pytest.mark.parametrize(("method", "path"), ROUTES)
@pytest.mark.parametrize(
    "headers",
    [
        {},
        {"Authorization": ""},
        {"Authorization": "Bearer "},
        {"Authorization": f"Bearer {TOKEN}x"},
        {"Authorization": f"bearer {TOKEN}"},
        {"Authorization": TOKEN},
        {"Authorization": f"Basic {TOKEN}"},
        {"Authorization": "Bearer \xe9\xff"},
        {"Cookie": f"token={TOKEN}"},
    ],
    ids=["none", "empty", "no token", "longer", "lower case", "bare", "basic", "bytes", "cookie"],
)
def test_without_the_token_nothing_is_answered(
    served: ServedManager, method: str, path: str, headers: dict[str, str]
) -> None:
    before = state(served)
    code, body = ask(served.at, method, path, b'{"count":1}', headers)
    assert code == 401
    assert json.loads(body) == {"error": "the job's token is missing or wrong"}
    assert state(served) == before


# --- what cannot be read --------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"[]",
        b"null",
        b"\xff\xfe",
        PICKLE,
        b'{"worker": 3}',
        b'{"worker": "vm.0.a", "machine": "vm"}',
        b"{}",
        b'{"worker": "vm.0.a", "deadline_s": -1}',
        b'{"worker": "vm.0.a", "deadline_s": 1e999}',
        b'{"worker": "vm.0.a", "deadline_s": NaN}',
        b'{"worker": "vm.0.a", "deadline_s": "1"}',
        b'{"worker": "vm.0.a", "why": "?"}',
        b'{"worker": "vm.0.a", "source": "\\u0000"}',
        b'{"worker": "vm.9.z"}',
        b'{"machine": "elsewhere"}',
        b'{"worker": "' + b"x" * 100_000 + b'"}',
    ],
)
def test_a_notice_that_cannot_be_is_an_error_and_changes_nothing(served: ServedManager, body: bytes) -> None:
    agent = Agent(served.at, "vm", "vm.0.a")
    wait_until(lambda: status(served.at).workers, TIMEOUT_S, "the worker is known")
    before = state(served)
    code, answer = ask(served.at, "POST", "/preempt", body)
    assert code in (400, 413)
    assert code == 413 or json.loads(answer)["error"]
    assert state(served) == before
    agent.link.close()


@pytest.mark.parametrize(
    "body", [b"", b"{}", b'{"count": 0}', b'{"count": -1}', b'{"count": 100000}', b'{"count": "2"}', PICKLE]
)
def test_workers_that_cannot_be_added(served: ServedManager, body: bytes) -> None:
    agent = Agent(served.at, "vm", "vm.0.a")
    wait_until(lambda: status(served.at).workers, TIMEOUT_S, "the agent is there")
    assert ask(served.at, "POST", "/workers", body)[0] == 400
    code, answer = ask(served.at, "POST", "/workers", b'{"count": 1, "machine": "elsewhere"}')
    assert (code, "elsewhere" in json.loads(answer)["error"]) == (400, True)
    agent.link.close()
    assert agent.got.empty()


@pytest.mark.parametrize(
    "query", ["after=x", "after=-1", "after=1e3", "follow=2", f"after={'9' * 50}", "after=²"]
)
def test_events_that_cannot_be_asked_for(served: ServedManager, query: str) -> None:
    assert ask(served.at, "GET", f"/events?{query.encode('ascii', 'replace').decode()}")[0] == 400


@pytest.mark.parametrize(
    "path",
    ["/worker", "/worker?incarnation=", "/worker?incarnation=%00", "/agent", f"/agent?machine={'x' * 201}"],
)
def test_names_that_are_none(served: ServedManager, path: str) -> None:
    assert ask(served.at, "GET", path)[0] == 400


@pytest.mark.parametrize(
    "frame",
    [
        b"",
        b"{",
        b"{}",
        b'{"type": "Nothing"}',
        b'{"type": "Formed", "generation": "0"}',
        b'{"type": "Beat", "more": 1}',
        PICKLE,
        b"\x00" * 1000,
        encode(WorkerExited(incarnation="vm.0.a", code=0)),  # an agent's
        "text",
    ],
)
@pytest.mark.parametrize("path", ["/worker?incarnation=vm.0.a", "/agent?machine=vm"])
def test_a_message_that_is_none_ends_the_connection_and_changes_nothing(
    served: ServedManager, path: str, frame: bytes | str
) -> None:
    agent = Agent(served.at, "vm", "vm.0.a", "vm.1.b")
    wait_until(lambda: len(status(served.at).workers) == 2, TIMEOUT_S, "both are known")
    if path.startswith("/agent") and isinstance(frame, bytes) and b"WorkerExited" in frame:
        frame = encode(Ready(digest="x"))  # a worker's
    before = state(served)

    async def send() -> int | None:
        async with (
            aiohttp.ClientSession(headers=GOOD) as session,
            session.ws_connect(served.at.url + path) as socket,
        ):
            await (socket.send_str(frame) if isinstance(frame, str) else socket.send_bytes(frame))
            async for message in socket:
                raise AssertionError(message)
            return socket.close_code

    assert asyncio.run(send()) in (1003, 1008)
    assert state(served) == before
    agent.link.close()


# --- workers and agents ---------------------------------------------------------------------


def test_a_worker_that_is_out_is_refused_and_told_why(served: ServedManager) -> None:
    agent = Agent(served.at, "vm", "vm.0.a", "vm.1.b")
    agent.link.send(encode(WorkerExited(incarnation="vm.1.b", code=-9)))
    states = {"vm.0.a": "started", "vm.1.b": "gone"}
    wait_until(
        lambda: {one.incarnation: one.status for one in status(served.at).workers} == states,
        TIMEOUT_S,
        "it goes",
    )
    refused: queue.SimpleQueue[Refusal] = queue.SimpleQueue()
    link = Link(
        f"{served.at.url}/worker",
        TOKEN,
        {"incarnation": "vm.1.b"},
        received=lambda _: None,
        greeting=list,
        refused=refused.put,
    )
    told = refused.get(timeout=TIMEOUT_S)
    assert told == Refusal(status=410, reason="vm.1.b is out: was ended by signal 9")
    link.close()
    agent.link.close()


def test_a_silent_worker_is_fenced_and_its_agent_is_to_kill_it(at: Place) -> None:
    served = ServedManager(at, heartbeat_limit_s=0.5)
    agent = Agent(at, "vm", "vm.0.a", "vm.1.b")
    refused: queue.SimpleQueue[Refusal] = queue.SimpleQueue()

    def link(name: str, beat_s: float) -> Link:
        return Link(
            f"{at.url}/worker",
            TOKEN,
            {"incarnation": name},
            received=lambda _: None,
            greeting=lambda: [encode(Ready(digest="d"))],
            refused=refused.put,
            beat=encode(Beat()),
            beat_s=beat_s,
        )

    lively, silent = link("vm.0.a", 0.05), link("vm.1.b", 0.0)
    wait_until(lambda: [one.status for one in status(at).workers] == ["ready"] * 2, TIMEOUT_S, "both are ready")
    ticking = at.loop.call(lambda: asyncio.ensure_future(tick(served)))
    try:
        assert agent.next() == StopWorker(incarnation="vm.1.b")
        assert refused.get(timeout=TIMEOUT_S).reason.startswith("vm.1.b is out: no sign of life for ")
        states = {one.incarnation: one.status for one in status(at).workers}
        assert states == {"vm.0.a": "ready", "vm.1.b": "gone"}
    finally:
        at.loop.call(ticking.cancel)
        for one in (lively, silent, agent.link):
            one.close()


async def tick(served: ServedManager) -> None:
    while True:
        served.hub.tick()
        await asyncio.sleep(0.02)


def test_a_new_connection_takes_the_place_of_the_old(served: ServedManager) -> None:
    async def both() -> tuple[int | None, bool]:
        async with aiohttp.ClientSession(headers=GOOD) as session:
            url = f"{served.at.url}/worker?incarnation=vm.0.a"
            async with session.ws_connect(url) as first, session.ws_connect(url) as second:
                async for message in first:
                    raise AssertionError(message)
                return first.close_code, second.closed

    assert asyncio.run(both()) == (1001, False)


def test_an_agent_hears_what_is_asked_for(served: ServedManager) -> None:
    agent = Agent(served.at, "vm", "vm.0.a")
    wait_until(lambda: status(served.at).workers, TIMEOUT_S, "the worker is known")
    code, answer = ask(served.at, "POST", "/workers", b'{"count": 3}')
    assert (code, json.loads(answer)) == (200, {"machine": "vm"})
    assert agent.next() == StartWorker(count=3)
    agent.link.close()
    wait_until(lambda: ask(served.at, "POST", "/workers", b'{"count": 1}')[0] == 400, TIMEOUT_S, "it is gone")


def test_a_notice_reaches_the_manager_from_people_and_from_agents(served: ServedManager) -> None:
    agent = Agent(served.at, "vm", "vm.0.a", "vm.1.b")
    wait_until(lambda: len(status(served.at).workers) == 2, TIMEOUT_S, "both are known")
    code, answer = ask(served.at, "POST", "/preempt", b'{"worker": "vm.0.a", "deadline_s": 9}')
    assert (code, json.loads(answer)) == (200, {"workers": ["vm.0.a"]})
    agent.link.send(encode(LeaveAsked(incarnation="vm.1.b", source="aws")))
    wait_until(lambda: all(one.leaving for one in status(served.at).workers), TIMEOUT_S, "both are asked")
    assert [one.leaving for one in status(served.at).workers] == ["user", "aws"]
    told = [event.text for event in status(served.at).events if event.kind == "notice"]
    assert told == [
        "vm.0.a is asked to leave within 9 s (user)",
        "vm.1.b is asked to leave (aws)",
    ]
    agent.link.close()


# --- events ---------------------------------------------------------------------------------


def test_events_are_lines_and_can_be_followed(served: ServedManager) -> None:
    tell = served.hub.events.add
    for number in range(3):
        served.at.loop.call(tell, "first", f"event {number}", 0)
    code, body = ask(served.at, "GET", "/events?after=1")
    assert code == 200
    assert [json.loads(line)["text"] for line in body.splitlines()] == ["event 1", "event 2"]
    address = urlsplit(served.at.url)
    connection = http.client.HTTPConnection(address.hostname or "", address.port, timeout=TIMEOUT_S)
    connection.request("GET", "/events?follow=1", headers=GOOD)
    response = connection.getresponse()
    assert [json.loads(response.readline())["number"] for _ in range(3)] == [1, 2, 3]
    served.at.loop.call(tell, "later", "event 3", 2)
    event = json.loads(response.readline())
    assert (event["kind"], event["text"], event["generation"]) == ("later", "event 3", 2)
    served.at.end()
    assert response.readline() == b""  # the end, not an error
    connection.close()
