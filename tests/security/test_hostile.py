"""Whatever comes to the manager's real server that is no message of the protocol changes nothing.

Random damage to every kind of message, raw bytes in the place of HTTP, and numbers that cannot be. The seed is
printed by pytest with the test's name.
"""

from __future__ import annotations

import asyncio
import random
import socket
from collections.abc import Iterator
from urllib.parse import urlsplit

import aiohttp
import msgspec
import pytest

from tests.morph.serving import TOKEN, Place, ServedManager, place
from tests.morph.world_parts import DESCRIBED
from varuna.errors import ProtocolError
from varuna.generations import HaltReport
from varuna.morph.messages import (
    Beat,
    Formed,
    FromAgent,
    FromWorker,
    Halted,
    InScript,
    LeaveAsked,
    LeaveWithdrawn,
    Offer,
    Ready,
    StepDone,
    WorkerExited,
    WorkerStarted,
    decode_from_agent,
    decode_from_worker,
    encode,
)

GOOD = {"Authorization": f"Bearer {TOKEN}"}
NUM_DAMAGED = 150
REPORT = HaltReport(
    generation=0,
    num_applied=3,
    reduced_step=3,
    committed_step=2,
    committed="{}",
    held_sections=(0, 1),
    reason="x",
)
FROM_WORKERS: list[FromWorker] = [
    Beat(),
    DESCRIBED,
    Ready(digest="d"),
    Formed(generation=0),
    StepDone(generation=0, step_index=1, duration_s=0.5, num_samples=4),
    InScript(generation=0, is_there=True),
    Halted(report=REPORT),
]
FROM_AGENTS: list[FromAgent] = [
    Offer(num_workers=2),
    WorkerStarted(incarnation="vm.0.a", machine="vm", rank=0),
    WorkerExited(incarnation="vm.1.b", code=-9),
    LeaveAsked(machine="vm", deadline_s=30.0, source="aws"),
    LeaveWithdrawn(machine="vm", source="aws"),
]
DOORS = {
    "/worker?incarnation=vm.0.a": (FROM_WORKERS, decode_from_worker),
    "/agent?machine=vm": (FROM_AGENTS, decode_from_agent),
}


@pytest.fixture
def served() -> Iterator[ServedManager]:
    """A manager that knows an agent and two founders."""
    with place() as at:
        manager = ServedManager(at)
        for rank, name in enumerate(("vm.0.a", "vm.1.b")):
            started = WorkerStarted(incarnation=name, machine="vm", rank=rank)
            at.loop.call(manager.hub.from_agent, "vm", encode(started))
        yield manager


def digest(served: ServedManager) -> bytes:
    """All that the manager knows."""
    return served.at.loop.call(lambda: msgspec.json.encode(served.manager.job, order="deterministic"))


def damaged(data: bytes, random_: random.Random) -> bytes:
    """A message with something wrong in it."""
    broken = bytearray(data)
    for _ in range(random_.randint(1, 4)):
        position = random_.randrange(len(broken)) if broken else 0
        match random_.randrange(5):
            case 0 if broken:
                broken[position] = random_.randrange(256)
            case 1 if broken:
                del broken[position:]
            case 2:
                broken[position:position] = random_.randbytes(random_.randint(1, 9))
            case 3 if broken:
                del broken[position : position + random_.randint(1, 5)]
            case _:
                broken[position:position] = random_.choice(
                    [b'"', b"{", b"}", b",", b"null", b"-1", b"1e999", b"\x00", b'"type":"Leave",']
                )
    return bytes(broken)


@pytest.mark.parametrize("path", DOORS)
@pytest.mark.parametrize("seed", [1, 2])
def test_damaged_messages_change_nothing(served: ServedManager, path: str, seed: int) -> None:
    messages, decode = DOORS[path]
    random_ = random.Random(seed)
    frames: list[bytes] = []
    while len(frames) < NUM_DAMAGED:
        frame = damaged(encode(random_.choice(messages)), random_)
        try:
            decode(frame)  # damage in a text leaves a message
        except ProtocolError:
            frames.append(frame)
    before = digest(served)
    assert asyncio.run(closed_with(served.at.url + path, frames)) == {1008}
    assert digest(served) == before


async def closed_with(url: str, frames: list[bytes]) -> set[int | None]:
    """With which codes the server closes the connections on which these are sent."""
    codes = set()
    async with aiohttp.ClientSession(headers=GOOD) as session:
        for frame in frames:
            async with session.ws_connect(url) as door:
                await door.send_bytes(frame)
                async for message in door:
                    raise AssertionError(message)
                codes.add(door.close_code)
    return codes


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"Offer","num_workers":-1}',
        b'{"type":"Offer","num_workers":1000000}',
        b'{"type":"Offer","num_workers":1,"number":0}',
        b'{"type":"WorkerStarted","incarnation":"","machine":"vm"}',
        b'{"type":"WorkerStarted","incarnation":"x","machine":"vm","rank":-1}',
        b'{"type":"WorkerStarted","incarnation":"' + b"x" * 300 + b'","machine":"vm"}',
        b'{"type":"LeaveAsked","machine":"vm","source":"aws","deadline_s":-1}',
        b'{"type":"LeaveAsked","machine":"vm","source":"aws","deadline_s":1e999}',
        b'{"type":"LeaveAsked","machine":"vm","source":"aws","deadline_s":1e300}',
    ],
)
def test_an_agents_numbers_that_cannot_be(served: ServedManager, frame: bytes) -> None:
    before = digest(served)
    assert asyncio.run(closed_with(f"{served.at.url}/agent?machine=vm", [frame])) == {1008}
    assert digest(served) == before


@pytest.mark.parametrize(
    "frame",
    [
        b'{"type":"Formed","generation":-1}',
        b'{"type":"StepDone","generation":0,"step_index":-1,"duration_s":1,"num_samples":1}',
        b'{"type":"StepDone","generation":0,"step_index":1,"duration_s":-1,"num_samples":1}',
        b'{"type":"StepDone","generation":0,"step_index":1,"duration_s":1e999,"num_samples":1}',
        b'{"type":"StepDone","generation":0,"step_index":1,"duration_s":1,"num_samples":-5}',
    ],
)
def test_a_workers_numbers_that_cannot_be(served: ServedManager, frame: bytes) -> None:
    before = digest(served)
    assert asyncio.run(closed_with(f"{served.at.url}/worker?incarnation=vm.0.a", [frame])) == {1008}
    assert digest(served) == before


@pytest.mark.parametrize("with_token", [True, False])
def test_bytes_that_are_no_http_change_nothing(
    served: ServedManager, caplog: pytest.LogCaptureFixture, with_token: bool
) -> None:
    random_ = random.Random(3)
    before = digest(served)
    token = f"Authorization: Bearer {TOKEN}\r\n" if with_token else ""
    requests = [
        f"{method} {target} HTTP/1.1\r\nHost: x\r\n{token}{more}\r\n".encode()
        for method in ("GET", "POST", "PUT", "DELETE", "\x01")
        for target in ("/preempt", "/workers", "/agent?machine=vm", "/../etc/passwd", "//", "*")
        for more in (
            "Content-Length: -1\r\n",
            "Content-Length: 5\r\nTransfer-Encoding: chunked\r\n",
            "X" * 9000,
        )
    ]
    requests += [random_.randbytes(random_.randint(1, 2000)) for _ in range(40)]
    requests += [damaged(random_.choice(requests[:90]), random_) for _ in range(60)]
    for request in requests:
        answer(served.at, request)
    assert digest(served) == before
    assert caplog.text == ""  # nor can strangers fill the log, or see a token there
    ask = f"GET /status HTTP/1.1\r\nHost: x\r\nAuthorization: Bearer {TOKEN}\r\nConnection: close\r\n\r\n"
    assert answer(served.at, ask.encode(), hangs_up=False).startswith(b"HTTP/1.1 200 OK")


def answer(at: Place, request: bytes, *, hangs_up: bool = True) -> bytes:
    """What comes back, until the server closes."""
    address = urlsplit(at.url)
    with socket.create_connection((address.hostname, address.port), timeout=10) as connection:
        try:
            connection.sendall(request)
            if hangs_up:
                connection.shutdown(socket.SHUT_WR)
            got = b""
            while data := connection.recv(65536):
                got += data
        except (ConnectionError, TimeoutError):
            return b""
    return got
