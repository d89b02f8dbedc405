"""Agents that are cut off or killed, as the hub sees them; with a clock that a test moves."""

from __future__ import annotations

import asyncio

from tests.morph.test_hub import Clock, Here
from varuna.morph.hub import LOST_S, RECONNECT_S, Hub
from varuna.morph.messages import (
    Offer,
    StartWorker,
    Welcome,
    WorkerStarted,
    decode_to_agent,
    encode,
)
from varuna.morph.planning import plan_for
from varuna.morph.policy import Policy
from varuna.morph.record import WorkerStatus
from varuna.morph.state import Manager

WELCOME = Welcome(run_id="run", store_port=1234)


def statuses(here: Here) -> dict[str, WorkerStatus]:
    return {name: worker.status for name, worker in here.manager.job.workers.items()}


def other_machine(here: Here, *names: str) -> None:
    """A second agent with workers."""
    here.hub.agent_connected("two", "box")
    for name in names:
        here.hub.from_agent("two", encode(WorkerStarted(incarnation=name, machine="box")))
        here.workers[name] = here.hub.worker_connected(name)


def test_a_killed_machine_is_found_without_waiting_for_heartbeats() -> None:
    async def play() -> None:
        here = Here(1)
        other_machine(here, "x0", "x1")
        for name in ("x0", "x1"):
            here.hub.worker_gone(name, here.workers[name], in_order=False)
        here.hub.agent_gone("two", here.hub._agents["two"])
        here.pass_time(LOST_S - 0.6, "w0")
        assert WorkerStatus.GONE not in statuses(here).values()
        here.pass_time(1.2, "w0")
        assert {name for name, status in statuses(here).items() if status is WorkerStatus.GONE} == {"x0", "x1"}
        reason = here.manager.job.workers["x0"].gone_reason
        assert reason == "its connection has ended, and its agent's"

    asyncio.run(play())


def test_an_agent_alone_may_be_away_for_long() -> None:
    """Its workers are heard."""

    async def play() -> None:
        here = Here(1)
        other_machine(here, "x0")
        here.hub.agent_gone("two", here.hub._agents["two"])
        here.pass_time(10 * LOST_S, "w0", "x0")
        assert WorkerStatus.GONE not in statuses(here).values()

    asyncio.run(play())


def test_nobody_is_condemned_if_all_connections_have_ended() -> None:
    """Then it is the manager's own that broke."""

    async def play() -> None:
        here = Here(1)
        other_machine(here, "x0")
        for name in ("w0", "x0"):
            here.hub.worker_gone(name, here.workers[name], in_order=False)
        for name in ("vm", "two"):
            here.hub.agent_gone(name, here.hub._agents[name])
        here.pass_time(2 * LOST_S)
        assert WorkerStatus.GONE not in statuses(here).values()

    asyncio.run(play())


def test_an_offer_of_an_agent_that_does_not_come_back_is_void() -> None:
    async def play() -> None:
        clock = Clock()
        manager = Manager(plan_for, policy=Policy(min_workers=9))
        hub = Hub(manager, clock)
        for name in ("a", "b"):
            hub.agent_connected(name)
            hub.from_agent(name, encode(Offer(num_workers=2)))
        hub.agent_gone("a", hub._agents["a"])
        clock.time_s += LOST_S + 0.1
        hub.tick()
        assert list(manager.job.offers) == ["b"]
        restarted = Hub(manager, clock)  # it has heard of none yet, and gives them time
        clock.time_s += LOST_S + 0.1
        restarted.tick()
        assert list(manager.job.offers) == ["b"]
        clock.time_s += RECONNECT_S
        restarted.tick()
        assert list(manager.job.offers) == []

    asyncio.run(play())


def test_agents_are_welcomed_before_anything_else() -> None:
    async def play() -> None:
        manager = Manager(plan_for)
        hub = Hub(manager, Clock(), welcome=WELCOME)
        hub.agent_connected("a", "box")
        hub.from_agent("a", encode(Offer(num_workers=2)))
        again = hub.agent_connected("a", "box")
        got = [decode_to_agent(again.queue.get_nowait() or b"") for _ in range(again.queue.qsize())]
        assert got == [WELCOME, StartWorker(count=2, offer=1)]

    asyncio.run(play())


def test_workers_are_added_where_there_are_fewest() -> None:
    async def play() -> None:
        here = Here(2)
        other_machine(here, "x0")
        here.hub.agent_connected("watcher")
        here.hub.from_agent("watcher", encode(Offer(num_workers=0)))
        assert here.hub.add_workers(1) == "box"
        assert here.hub.add_workers(1, "vm") == "vm"

    asyncio.run(play())
