"""The launcher's line to the manager, against a real manager's server."""

from __future__ import annotations

import select
from collections.abc import Iterator

import pytest

from tests.launch.jobs import wait_until
from tests.morph.serving import TOKEN, Place, ServedManager, place
from varuna.launch.agent import Agent
from varuna.morph.link import Refusal
from varuna.morph.messages import JobEnded, StartWorker, StopWorker, encode

TIMEOUT_S = 60


@pytest.fixture
def at() -> Iterator[Place]:
    with place() as found:
        yield found


def states(served: ServedManager) -> dict[str, tuple[str, int | None, str]]:
    """What the manager knows of each worker: status, rank as a founder, why it is gone."""

    def read() -> dict[str, tuple[str, int | None, str]]:
        workers = served.manager.job.workers.values()
        return {one.incarnation: (one.status.value, one.founding_rank, one.gone_reason) for one in workers}

    return served.at.loop.call(read)


def test_names_are_never_used_twice(at: Place) -> None:
    agents = [Agent(at.url, TOKEN, "a.machine") for _ in range(2)]
    names = [agent.incarnation_of(index) for agent in agents for index in (0, 1)]
    assert len(set(names)) == 4
    assert all(name.startswith(f"a.machine.{index}.") for name, index in zip(names, (0, 1, 0, 1), strict=True))
    assert agents[0].incarnation_of(1) == names[1]
    assert [agents[0].worker_index_of(name) for name in names] == [0, 1, None, None]
    for agent in agents:
        agent.close()


def test_it_tells_of_starts_and_ends_and_tells_everything_again_to_the_next_manager(at: Place) -> None:
    first = ServedManager(at)
    agent = Agent(at.url, TOKEN, "vm")
    names = [agent.incarnation_of(index) for index in range(3)]
    agent.worker_started(0, 0)
    agent.worker_started(1, 1)
    agent.worker_started(2, None)
    agent.worker_exited(2, -9, "")
    expected = {
        names[0]: ("started", 0, ""),
        names[1]: ("started", 1, ""),
        names[2]: ("gone", None, "was ended by signal 9"),
    }
    wait_until(lambda: states(first) == expected, TIMEOUT_S, "all is known")
    at.end()
    agent.worker_exited(0, -11, "")
    second = ServedManager(at)
    expected[names[0]] = ("gone", 0, "was ended by signal 11")
    wait_until(lambda: states(second) == expected, TIMEOUT_S, "all is known again")
    agent.close()


def test_orders_wait_until_they_are_taken(at: Place) -> None:
    served = ServedManager(at)
    agent = Agent(at.url, TOKEN, "vm")
    agent.worker_started(0, 0)
    wait_until(lambda: states(served), TIMEOUT_S, "it is connected")
    assert agent.orders() == []
    orders = [StartWorker(count=2), StopWorker(incarnation="x"), JobEnded(failure="over")]
    for order in orders:
        at.loop.call(served.hub._agents["vm"].send, encode(order))
    taken: list[object] = []

    def take() -> bool:
        if select.select([agent], [], [], 0)[0]:
            taken.extend(agent.orders())
        return len(taken) == len(orders)

    wait_until(take, TIMEOUT_S, "three orders")
    assert taken == orders
    assert not select.select([agent], [], [], 0)[0]
    agent.close()


def test_a_refusal_is_an_order_too(at: Place) -> None:
    ServedManager(at)
    agent = Agent(at.url, "wrong", "vm")
    assert select.select([agent], [], [], TIMEOUT_S)[0]
    assert agent.orders() == [Refusal(status=401, reason="the job's token is missing or wrong")]
    agent.close()
