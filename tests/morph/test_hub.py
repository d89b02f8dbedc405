"""The hub without sockets and with a clock that a test moves: liveness, delivery, what is written down."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest

from varuna.errors import ProtocolError
from varuna.morph.event_log import EventLog
from varuna.morph.hub import RECONNECT_S, START_PATIENCE, Connection, Hub
from varuna.morph.instructions import Instruction
from varuna.morph.messages import (
    Alive,
    Beat,
    Leave,
    LeaveAsked,
    Ready,
    StopWorker,
    WorkerExited,
    WorkerStarted,
    decode_to_agent,
    decode_to_worker,
    encode,
)
from varuna.morph.planning import plan_for
from varuna.morph.record import WorkerStatus
from varuna.morph.state import Manager

LIMIT_S = 10.0
BEAT = encode(Beat())


class Clock:
    def __init__(self) -> None:
        self.time_s = 100.0

    def now_s(self) -> float:
        return self.time_s


@dataclass
class Books:
    """What was written down, in order."""

    written: list[tuple[str, Any]] = field(default_factory=list)
    problem: str = ""

    def received(self, sender: str, message: Any, now_s: float) -> None:
        self.written.append((sender, message))

    def ticked(self, now_s: float) -> None:
        self.written.append(("tick", now_s))

    def follow(self, instructions: Sequence[Instruction]) -> None:
        self.written.append(("follow", list(instructions)))


class Here:
    """A hub with one agent and some workers that are ready to join."""

    def __init__(self, num_workers: int, manager: Manager | None = None) -> None:
        self.clock, self.books = Clock(), Books()
        self.manager = manager or Manager(plan_for)
        self.hub = Hub(self.manager, self.clock, books=self.books, heartbeat_limit_s=LIMIT_S)
        self.agent = self.hub.agent_connected("vm")
        self.workers: dict[str, Connection] = {}
        for index in range(num_workers):
            self.add(f"w{index}")

    def add(self, name: str) -> None:
        self.hub.from_agent("vm", encode(WorkerStarted(incarnation=name, machine="vm")))
        self.workers[name] = self.hub.worker_connected(name)
        self.hub.from_worker(name, self.workers[name], encode(Ready(digest="d")))

    def pass_time(self, seconds: float, *beating: str, step_s: float = 0.5) -> None:
        """Time passes; these workers beat."""
        end_s = self.clock.time_s + seconds
        while self.clock.time_s < end_s:
            self.clock.time_s += step_s
            for name in beating:
                self.hub.from_worker(name, self.workers[name], BEAT)
            self.hub.tick()

    def status(self, name: str) -> WorkerStatus:
        return self.manager.job.workers[name].status

    def sent(self, connection: Connection) -> list[Any]:
        found = []
        while not connection.queue.empty():
            data = connection.queue.get_nowait()
            decode = decode_to_agent if connection is self.agent else decode_to_worker
            found.append(None if data is None else decode(data))
        return [message for message in found if not isinstance(message, Alive)]

    def num_alive(self, connection: Connection) -> int:
        """How often an agent would hear that the manager is at work."""
        found = [connection.queue.get_nowait() for _ in range(connection.queue.qsize())]
        return sum(data == encode(Alive()) for data in found)


def test_agents_hear_about_once_a_second_that_the_manager_is_at_work() -> None:
    here = Here(2)
    here.sent(here.agent)
    here.pass_time(20.0, "w0", "w1")
    assert 18 <= here.num_alive(here.agent) <= 20


def test_a_silent_worker_is_fenced_when_its_limit_is_over_and_not_before() -> None:
    here = Here(2)
    here.pass_time(LIMIT_S - 1, "w0")
    assert here.status("w1") is WorkerStatus.READY
    here.pass_time(1.5, "w0")
    assert here.status("w1") is WorkerStatus.GONE
    assert here.status("w0") is WorkerStatus.READY
    assert here.sent(here.agent) == [StopWorker(incarnation="w1")]
    assert here.hub.refusal_of("w1").startswith("no sign of life for ")
    assert here.hub.refusal_of("w0") == ""
    assert here.sent(here.workers["w1"]) == [None]  # its connection is closed
    here.hub.from_worker("w1", here.workers["w1"], encode(Ready(digest="d")))
    assert here.status("w1") is WorkerStatus.GONE


def test_books_that_cannot_be_written_are_told_of_once_and_left_alone() -> None:
    here = Here(2)
    here.books.problem = "the disk is full"
    here.pass_time(1, "w0", "w1")
    here.hub.from_worker("w0", here.workers["w0"], encode(Ready(digest="d")))
    written = list(here.books.written)
    here.pass_time(LIMIT_S + 1, "w0")
    assert here.status("w1") is WorkerStatus.GONE
    assert here.books.written == written
    events = [event for event in here.hub.events.after(0) if event.kind == "journal"]
    assert [event.text for event in events] == ["the disk is full"]


def test_any_message_is_a_sign_of_life() -> None:
    here = Here(2)
    for _ in range(5):
        here.pass_time(LIMIT_S / 2, "w0")
        here.hub.from_worker("w1", here.workers["w1"], encode(Ready(digest="d")))
    assert here.status("w1") is WorkerStatus.READY


@pytest.mark.parametrize("num_workers", [1, 3])
def test_when_nobody_is_heard_nobody_is_fenced(num_workers: int) -> None:
    here = Here(num_workers)
    here.pass_time(5 * LIMIT_S)
    assert here.sent(here.agent) == []
    assert [event.kind for event in here.hub.events.after(0)].count("silence") == 1
    here.pass_time(1, *here.workers)
    here.pass_time(LIMIT_S + 1, *list(here.workers)[1:])
    assert here.status("w0") is (WorkerStatus.GONE if num_workers > 1 else WorkerStatus.READY)


def test_time_in_which_the_manager_slept_counts_little() -> None:
    here = Here(2)
    here.pass_time(3 * LIMIT_S, step_s=3 * LIMIT_S)
    assert here.status("w0") is WorkerStatus.READY


def test_a_worker_that_closed_its_connection_is_not_missed_and_one_whose_connection_broke_is() -> None:
    here = Here(3)
    here.hub.worker_gone("w1", here.workers["w1"], in_order=True)
    here.hub.worker_gone("w2", here.workers["w2"], in_order=False)
    here.pass_time(LIMIT_S + 1, "w0")
    assert [here.status(name) for name in ("w0", "w1", "w2")] == [
        WorkerStatus.READY,
        WorkerStatus.READY,
        WorkerStatus.GONE,
    ]


def test_a_worker_whose_process_has_ended_is_not_missed() -> None:
    here = Here(3)
    here.hub.from_agent("vm", encode(WorkerExited(incarnation="w1", code=-9)))
    events = len(here.hub.events.after(0))
    here.pass_time(LIMIT_S + 1, "w0", "w2")
    assert len(here.hub.events.after(0)) == events
    assert here.sent(here.agent) == []


def test_a_worker_that_is_just_starting_has_more_time() -> None:
    here = Here(1)
    here.hub.from_agent("vm", encode(WorkerStarted(incarnation="new", machine="vm")))
    here.workers["new"] = here.hub.worker_connected("new")
    here.pass_time(START_PATIENCE * LIMIT_S - 1, "w0")
    assert here.status("new") is WorkerStatus.STARTED
    here.pass_time(1.5, "w0")
    assert here.status("new") is WorkerStatus.GONE


def test_a_manager_that_was_started_again_gives_its_workers_time_to_find_it() -> None:
    before = Here(2)
    here = Here(0, Manager(plan_for, job=before.manager.job))
    here.workers["w0"] = here.hub.worker_connected("w0")
    here.pass_time(LIMIT_S + RECONNECT_S - 1, "w0")
    assert here.status("w1") is WorkerStatus.READY
    here.pass_time(1.5, "w0")
    assert here.status("w1") is WorkerStatus.GONE


def test_what_comes_on_a_connection_that_was_replaced_is_not_heard() -> None:
    here = Here(1)
    here.hub.from_agent("vm", encode(WorkerStarted(incarnation="late", machine="vm")))
    old = here.hub.worker_connected("late")
    new = here.hub.worker_connected("late")
    assert here.sent(old) == [None]
    here.hub.from_worker("late", old, encode(Ready(digest="d")))
    assert here.status("late") is WorkerStatus.STARTED
    here.hub.worker_gone("late", old, in_order=True)
    here.hub.from_worker("late", new, encode(Ready(digest="d")))
    assert here.status("late") is WorkerStatus.READY


def test_everything_but_beats_is_written_down_before_it_is_told() -> None:
    here = Here(1)
    here.books.written.clear()
    here.hub.from_worker("w0", here.workers["w0"], BEAT)
    assert here.books.written == []
    exited = WorkerExited(incarnation="w0", code=-9)
    told = len(here.hub.events.after(0))
    here.hub.from_agent("vm", encode(exited))
    assert here.books.written[0] == ("vm", exited)
    assert here.books.written[1][0] == "follow"
    assert len(here.hub.events.after(0)) > told


def test_what_cannot_be_read_changes_nothing() -> None:
    here = Here(1)
    here.books.written.clear()
    for data in (b"", b"{}", encode(Leave(reason="a manager's"))):
        with pytest.raises(ProtocolError):
            here.hub.from_worker("w0", here.workers["w0"], data)
        with pytest.raises(ProtocolError):
            here.hub.from_agent("vm", data)
    assert here.books.written == []


def test_a_worker_that_missed_its_order_hears_it_when_it_is_back() -> None:
    here = Here(1)
    here.hub.worker_gone("w0", here.workers["w0"], in_order=False)
    here.hub.ask_to_leave(LeaveAsked(incarnation="w0", source="user"))
    connection = here.hub.worker_connected("w0")
    assert [type(message) for message in here.sent(connection)] == [Leave]


# --- events ---------------------------------------------------------------------------------


def test_events_are_numbered_and_followed() -> None:
    async def follow() -> list[int]:
        log = EventLog()
        log.add("a", "one", 0)
        seen: list[int] = []

        async def read() -> None:
            async for events in log.follow(0):
                seen.extend(event.number for event in events)

        reading = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        for _ in range(3):
            log.add("b", "more", 1)
            await asyncio.sleep(0)
        log.add("c", "last", 1)
        log.close()
        await reading
        assert [event.kind for event in log.after(3)] == ["b", "c"]
        assert log.after(5) == log.after(99) == []
        assert [event.number for event in log.newest(2, without="b")] == [1, 5]
        return seen

    assert asyncio.run(follow()) == [1, 2, 3, 4, 5]
