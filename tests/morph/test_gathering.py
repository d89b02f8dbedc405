"""How a job of many machines begins: agents offer workers, the manager says who starts which."""

from __future__ import annotations

import pytest

from tests.morph.world_parts import DESCRIBED, planner
from varuna.morph.instructions import Instruction, Send
from varuna.morph.messages import (
    AgentLost,
    Formed,
    JobEnded,
    Offer,
    StartFounders,
    StartWorker,
    StopWorker,
    WorkerExited,
    WorkerStarted,
)
from varuna.morph.phases import Phase
from varuna.morph.policy import Policy
from varuna.morph.record import WorkerStatus
from varuna.morph.state import Manager

SETTLE_S = 5.0


def gathering(min_workers: int = 3) -> Manager:
    return Manager(planner(1, (1,)), policy=Policy(min_workers=min_workers, settle_s=SETTLE_S))


def sent(instructions: tuple[Instruction, ...]) -> dict[str, object]:
    return {one.recipient: one.message for one in instructions if isinstance(one, Send)}


def found(manager: Manager, now_s: float = 20.0) -> None:
    """Two agents with two workers each start founders, which form generation 0."""
    manager.handle("a", Offer(num_workers=2), 1.0)
    manager.handle("b", Offer(num_workers=2), 2.0)
    orders = sent(manager.tick(now_s))
    start(manager, orders, now_s)


def start(manager: Manager, orders: dict[str, object], now_s: float) -> None:
    for agent, order in orders.items():
        assert isinstance(order, StartFounders)
        for rank in range(order.first_rank, order.first_rank + order.count):
            name = f"{agent}.{rank}.{order.attempt}"
            manager.handle(
                agent,
                WorkerStarted(incarnation=name, machine=agent, rank=rank, attempt=order.attempt),
                now_s,
            )


def form(manager: Manager, names: list[str], now_s: float = 21.0) -> None:
    plan = manager._plan_for(len(names), DESCRIBED).plan
    manager.handle(names[0], DESCRIBED, now_s)
    for name in names:
        manager.handle(name, Formed(generation=0, plan=plan if name == names[0] else None), now_s)


def test_it_waits_for_enough_workers_and_then_for_those_about_to_come() -> None:
    manager = gathering()
    assert sent(manager.handle("a", Offer(num_workers=2), 10.0)) == {}
    assert manager.tick(1000.0) == ()
    assert manager.job.reason == "2 of at least 3 workers are offered"
    manager.handle("b", Offer(num_workers=3), 1000.0)
    assert manager.tick(1000.0 + SETTLE_S - 0.1) == ()
    manager.handle("c", Offer(num_workers=1), 1004.0)
    assert manager.tick(1000.0 + SETTLE_S + 0.1) == ()
    assert sent(manager.tick(1004.0 + SETTLE_S)) == {
        "a": StartFounders(count=2, first_rank=0, size=6),
        "b": StartFounders(count=3, first_rank=2, size=6),
        "c": StartFounders(count=1, first_rank=5, size=6),
    }
    assert manager.tick(2000.0) == ()


def test_who_offers_none_is_told_of_the_end_only() -> None:
    manager = gathering(1)
    manager.handle("watcher", Offer(num_workers=0), 0.0)
    manager.handle("a", Offer(num_workers=1), 0.0)
    assert set(sent(manager.tick(9.0))) == {"a"}
    manager.handle("a", WorkerStarted(incarnation="a.0.x", machine="a", rank=0), 9.0)
    form(manager, ["a.0.x"], 10.0)
    ended = sent(manager.handle("a", WorkerExited(incarnation="a.0.x", code=7), 11.0))
    assert ended["watcher"] == ended["a"] == JobEnded(failure="a.0.x exited with code 7", code=7)
    assert sent(manager.handle("late", Offer(num_workers=4), 12.0)) == {"late": ended["a"]}


def test_an_agent_that_goes_before_is_not_counted() -> None:
    manager = gathering()
    manager.handle("a", Offer(num_workers=2), 1.0)
    manager.handle("b", Offer(num_workers=2), 1.0)
    manager.handle("", AgentLost(agent="a"), 2.0)
    assert manager.tick(100.0) == ()
    manager.handle("a", Offer(num_workers=2), 200.0)  # it was only cut off
    assert sent(manager.tick(300.0))["b"] == StartFounders(count=2, first_rank=0, size=4)


def test_an_agent_that_comes_later_starts_newcomers_once() -> None:
    manager = gathering()
    found(manager)
    order = StartWorker(count=5, offer=1)
    assert sent(manager.handle("c", Offer(num_workers=5), 25.0)) == {"c": order}
    assert sent(manager.handle("c", Offer(num_workers=5), 26.0)) == {}
    assert sent(manager.repeat_for("c")) == {"c": order}  # it may not have heard
    again = sent(manager.handle("c", Offer(num_workers=5, number=2), 27.0))
    assert again == {"c": StartWorker(count=5, offer=2)}


def test_with_a_launcher_that_founds_the_job_agents_bring_newcomers() -> None:
    manager = Manager(planner(1, (1,)))
    assert sent(manager.handle("a", Offer(num_workers=1), 0.0)) == {"a": StartWorker(count=1, offer=1)}


def test_a_machine_lost_before_anything_is_known_begins_it_anew() -> None:
    manager = gathering()
    found(manager)
    stopped = manager.handle("", AgentLost(agent="b"), 30.0)
    stops = [one.message for one in stopped if isinstance(one, Send)]
    assert stops == [StopWorker(incarnation=name) for name in ("a.0.0", "a.1.0", "b.2.0", "b.3.0")]
    assert manager.job.phase is Phase.FOUNDING
    assert manager.tick(100.0) == ()  # two are offered, three are needed
    late = WorkerStarted(incarnation="a.9.0", machine="a", rank=1, attempt=0)
    assert sent(manager.handle("a", late, 101.0)) == {"a": StopWorker(incarnation="a.9.0")}
    manager.handle("c", Offer(num_workers=1), 102.0)
    orders = sent(manager.tick(110.0))
    assert orders == {
        "a": StartFounders(count=2, first_rank=0, size=3, attempt=1),
        "c": StartFounders(count=1, first_rank=2, size=3, attempt=1),
    }
    start(manager, orders, 111.0)
    form(manager, ["a.0.1", "a.1.1", "c.2.1"], 112.0)
    assert manager.job.phase is Phase.RUNNING
    assert manager.job.generation.members == ("a.0.1", "a.1.1", "c.2.1")


def test_so_does_a_founder_that_is_killed() -> None:
    manager = gathering()
    found(manager)
    manager.handle("a", WorkerExited(incarnation="a.1.0", code=-9), 30.0)
    policy = manager.policy
    assert manager.tick(30.0 + policy.founding_grace_s - 0.1) == ()
    manager.tick(30.0 + policy.founding_grace_s)
    assert manager.job.attempt == 1
    orders = sent(manager.tick(30.0 + policy.founding_grace_s + SETTLE_S))
    assert orders["b"] == StartFounders(count=2, first_rank=2, size=4, attempt=1)


def test_a_founder_that_fails_by_itself_ends_the_job() -> None:
    manager = gathering()
    found(manager)
    ended = sent(manager.handle("a", WorkerExited(incarnation="a.1.0", code=1, failure="KeyError: 'x'"), 30.0))
    assert ended["b"] == JobEnded(failure="a.1.0 failed: KeyError: 'x'", code=1)


def test_an_agent_lost_later_is_no_news() -> None:
    manager = gathering()
    found(manager)
    form(manager, ["a.0.0", "a.1.0", "b.2.0", "b.3.0"])
    assert manager.handle("", AgentLost(agent="b"), 50.0) == ()
    assert all(one.status is WorkerStatus.MEMBER for one in manager.job.workers.values())


@pytest.mark.parametrize("agent", ["a", "b"])
def test_orders_to_found_are_told_again_to_an_agent_that_was_away(agent: str) -> None:
    manager = gathering()
    manager.handle("a", Offer(num_workers=2), 1.0)
    manager.handle("b", Offer(num_workers=2), 2.0)
    orders = sent(manager.tick(10.0))
    assert sent(manager.repeat_for(agent)) == {agent: orders[agent]}
