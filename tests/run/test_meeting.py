"""The store of a generation: offered by all, served by one, left at once when it is gone or given up."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import pytest

from tests.launch.jobs import wait_until
from varuna.errors import PeerLost, ProtocolError
from varuna.generations import Formation
from varuna.plan import simple_plan
from varuna.run.meeting import Meeting, StoreOffer, store_as_peer
from varuna.spec import SectionSpec


def formation(address: str, *, size: int = 2) -> Formation:
    section = SectionSpec(
        index=0, name="0", parameter_names=(), parameter_bytes=1, forward_flops=1.0, output_bytes=1
    )
    plan = simple_plan(sections=[section], num_workers=size, batch_size=4, num_stages=1, micro_batch_size=1)
    return Formation(
        generation=3,
        rank=0,
        size=size,
        plan=plan.plan,
        transfers=(),
        state_rank=0,
        next_step=0,
        store_address=address,
    )


def num_threads() -> int:
    return len(os.listdir("/proc/self/task"))


def test_whoever_offered_the_store_serves_it_and_the_others_find_it() -> None:
    taken, other = StoreOffer("127.0.0.1"), StoreOffer("127.0.0.1")
    plan = formation(taken.address)
    mine, theirs = Meeting(plan, taken).connect(), Meeting(plan, other).connect()
    mine.set("a", "1")
    assert theirs.get("a") == b"1"
    assert (Meeting(plan, None).index, Meeting(plan, None).plan) == (3, plan.plan)


def test_an_offer_that_is_not_taken_ends() -> None:
    taken = StoreOffer("127.0.0.1")
    before = num_threads()
    for _ in range(3):
        meeting = Meeting(formation(taken.address), StoreOffer("127.0.0.1"))
        store = meeting.connect()
        wait_until(lambda: num_threads() <= before, 120, "nothing serves what nobody takes")
    del store, meeting


def test_one_worker_alone_needs_none() -> None:
    Meeting(formation("", size=1), None).connect().set("a", "1")
    with pytest.raises(ProtocolError, match="2 members and no store"):
        Meeting(formation(""), None).connect()


def test_a_store_that_is_gone_is_missed_at_once() -> None:
    address = StoreOffer("127.0.0.1").address
    with pytest.raises(PeerLost, match=f"does not answer at {address}"):
        Meeting(formation(address), None).connect()


def test_waiting_for_a_key_ends_when_the_generation_is_given_up() -> None:
    offer = StoreOffer("127.0.0.1")
    meeting = Meeting(formation(offer.address), None)
    store = meeting.connect()
    ended = _in_thread(lambda: store.wait(["never"], timedelta(seconds=60)))
    meeting.abort("worker 1 is gone")
    assert isinstance(ended(), PeerLost)
    with pytest.raises(PeerLost), store_as_peer():
        store.check(["a"])


def test_whoever_is_told_before_it_is_connected_does_not_stay() -> None:
    offer = StoreOffer("127.0.0.1")
    meeting = Meeting(formation(offer.address), None)
    meeting.abort("worker 1 is gone")
    with pytest.raises(PeerLost, match="worker 1 is gone"):
        meeting.connect()


def test_a_served_store_ends_with_its_process(tmp_path: Path) -> None:
    address = tmp_path / "address"
    pid = os.fork()
    if pid == 0:
        offer = StoreOffer("127.0.0.1")
        (tmp_path / "part").write_text(offer.address)
        (tmp_path / "part").rename(address)
        threading.Event().wait()
    wait_until(address.exists, 120, "a store is offered")
    store = Meeting(formation(address.read_text()), None).connect()
    ended = _in_thread(lambda: store.wait(["never"], timedelta(seconds=60)))
    os.kill(pid, 9)
    os.waitpid(pid, 0)
    assert isinstance(ended(), PeerLost)


def _in_thread(wait: Callable[[], object]) -> Callable[[], BaseException]:
    """Waits in a thread; what it ended with."""
    found: list[BaseException] = []

    def work() -> None:
        try:
            with store_as_peer():
                wait()
        except BaseException as error:
            found.append(error)

    thread = threading.Thread(target=work)
    thread.start()

    def ended() -> BaseException:
        thread.join(10)
        assert not thread.is_alive()
        return found[0]

    return ended
