"""Liveness: who is silent, who is refused, and that the manager's own naps condemn nobody."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.morph.heartbeat import Heartbeats

LIMIT_S = 8.0
TICK_S = 1.0


def beating(*workers: str, now_s: float = 0.0) -> Heartbeats:
    heartbeats = Heartbeats(LIMIT_S)
    for worker in workers:
        heartbeats.expect(worker, "i1", now_s)
        assert heartbeats.beat(worker, "i1", now_s) is None
    return heartbeats


def names(heartbeats: Heartbeats, now_s: float) -> list[str]:
    return [suspect.worker for suspect in heartbeats.suspects(now_s)]


def test_a_silent_worker_is_found_at_the_limit_with_a_reason():
    heartbeats = beating("a", "b")
    for now_s in range(1, 8):
        assert heartbeats.beat("b", "i1", now_s) is None
        assert heartbeats.suspects(now_s) == ()
    [suspect] = heartbeats.suspects(8.0)
    assert (suspect.worker, suspect.incarnation, suspect.silent_s) == ("a", "i1", 8.0)
    assert not suspect.all_are_silent
    assert suspect.reason == "a (incarnation i1): no heartbeat for 8.0 s of 8 s"
    assert heartbeats.beat("a", "i1", 8.5) is None  # it was only slow
    assert heartbeats.suspects(9.0) == ()


def test_a_newcomer_that_never_beats_is_found_within_its_own_limit():
    heartbeats = beating("a")
    heartbeats.expect("b", "i4", 0.0, limit_s=3.0)
    for now_s in (1.0, 2.0):
        heartbeats.beat("a", "i1", now_s)
        assert heartbeats.suspects(now_s) == ()
    heartbeats.beat("a", "i1", 3.0)
    [suspect] = heartbeats.suspects(3.0)
    assert (suspect.worker, suspect.incarnation) == ("b", "i4")
    assert "no first heartbeat" in suspect.reason


def test_everyone_silent_is_said():
    heartbeats = beating("a", "b", "c")
    suspects = [heartbeats.suspects(float(now_s)) for now_s in range(9)][-1]
    assert [suspect.all_are_silent for suspect in suspects] == [True] * 3
    assert "own link" in suspects[0].reason


def test_a_frozen_worker_comes_back_only_as_a_new_incarnation():
    heartbeats = beating("a")
    heartbeats.fence("a", "i1", "silent for 8 s")
    assert heartbeats.live() == {}
    refused = heartbeats.beat("a", "i1", 20.0)
    assert refused is not None
    assert refused.reason == "silent for 8 s"
    assert heartbeats.beat("a", "i2", 20.0) is not None  # it cannot name itself
    heartbeats.expect("a", "i2", 21.0)
    assert heartbeats.beat("a", "i2", 21.0) is None
    assert heartbeats.live() == {"a": "i2"}
    late = heartbeats.beat("a", "i1", 22.0)
    assert late is not None
    assert "incarnation i2 is expected in its place" in late.reason
    heartbeats.fence("a", "i1", "late decision")  # touches nothing
    assert heartbeats.live() == {"a": "i2"}


def test_strangers_are_refused():
    assert Heartbeats(LIMIT_S).beat("a", "i1", 0.0) is not None


@given(
    gap_s=st.floats(0, 1e6),
    before=st.integers(0, 20),
    is_tick_first=st.booleans(),
)
def test_workers_that_beat_survive_any_nap_of_the_manager(gap_s, before, is_tick_first):
    """Their beats lie in its sockets: even if it looks at the clock before it reads, nobody is suspect."""
    heartbeats = beating("a", "b", "c")
    now_s = 0.0
    for _ in range(before):
        now_s += TICK_S
        if int(now_s) % 2 == 0:  # a beat every quarter of the limit
            for worker in "abc":
                heartbeats.beat(worker, "i1", now_s)
        assert heartbeats.suspects(now_s) == ()
    now_s += gap_s
    if is_tick_first:
        assert heartbeats.suspects(now_s) == ()
    for worker in "abc":
        assert heartbeats.beat(worker, "i1", now_s) is None
    assert heartbeats.suspects(now_s) == ()


@given(gaps_s=st.lists(st.floats(3, 1e5), max_size=3), start_s=st.floats(-1e6, 1e6))
def test_a_silent_worker_is_found_whatever_naps_there_were(gaps_s, start_s):
    heartbeats = beating("a", "b", now_s=start_s)
    now_s = start_s
    found_after = None
    num_ticks = 0
    gaps = list(gaps_s)
    while found_after is None:
        now_s += gaps.pop() if gaps else TICK_S
        num_ticks += 1
        heartbeats.beat("b", "i1", now_s)
        if "a" in names(heartbeats, now_s):
            found_after = num_ticks
        assert num_ticks <= LIMIT_S / TICK_S + 1
    # A nap counts for at most a quarter of the limit.
    assert found_after >= LIMIT_S / TICK_S - len(gaps_s) * (LIMIT_S / 4 / TICK_S - 1) - 1


@given(jump_s=st.floats(-1e6, 0))
def test_a_clock_that_jumps_back_condemns_nobody_and_stops_nothing(jump_s):
    heartbeats = beating("a")
    assert heartbeats.suspects(5.0 + jump_s) == ()
    found = [names(heartbeats, 5.0 + jump_s + tick) for tick in range(10)]
    assert found[-1] == ["a"]


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["expect", "beat", "fence", "tick"]),
            st.sampled_from("ab"),
            st.sampled_from(["i1", "i2", "i3", "i4"]),
            st.floats(0, 5),
        ),
        max_size=60,
    )
)
def test_nothing_old_or_fenced_is_ever_heard_again(actions):
    heartbeats = Heartbeats(LIMIT_S)
    newest: dict[str, str] = {}
    used: set[tuple[str, str]] = set()
    fenced: set[tuple[str, str]] = set()
    now_s = 0.0
    for action, worker, incarnation, passed_s in actions:
        now_s += passed_s
        if action == "expect" and (worker, incarnation) not in used:
            heartbeats.expect(worker, incarnation, now_s)
            used.add((worker, incarnation))
            newest[worker] = incarnation
        elif action == "fence":
            heartbeats.fence(worker, incarnation, "out")
            if newest.get(worker) == incarnation:
                fenced.add((worker, incarnation))
        elif action == "beat":
            is_refused = heartbeats.beat(worker, incarnation, now_s) is not None
            is_current = newest.get(worker) == incarnation and (worker, incarnation) not in fenced
            assert is_refused == (not is_current)
        for suspect in heartbeats.suspects(now_s):
            assert (suspect.worker, suspect.incarnation) not in fenced
            assert newest[suspect.worker] == suspect.incarnation
            assert suspect.silent_s >= LIMIT_S
    assert heartbeats.live() == {
        worker: incarnation for worker, incarnation in newest.items() if (worker, incarnation) not in fenced
    }


@pytest.mark.parametrize(("limit_s", "most_gap_s"), [(0, None), (-1, None), (1, 0)])
def test_limits_are_positive(limit_s, most_gap_s):
    with pytest.raises(AssertionError):
        Heartbeats(limit_s, most_gap_s=most_gap_s)
