"""One clock for workers of several machines."""

from __future__ import annotations

import time

import pytest

from tests.run.processes import Context, run_workers
from varuna.run.clocks import ClockOffset, Exchange, align_clocks, machine_identity, offset_of


def test_the_quickest_exchange_decides() -> None:
    slow = Exchange(asked_s=10.0, there_s=110.9, answered_s=11.0)
    quick = Exchange(asked_s=20.0, there_s=120.01, answered_s=20.02)
    found = offset_of([slow, quick, slow])
    assert found.offset_s == pytest.approx(100.0)
    assert found.accuracy_s == pytest.approx(0.01)


def skewed(context: Context, skew_s: list[float], machines: list[str]) -> list[list[float]]:
    groups = context.groups()
    skew = skew_s[context.rank]
    machine = machines[context.rank]
    offsets = align_clocks(groups.all, context.rank, machine=machine, now_s=lambda: time.monotonic() + skew)
    groups.close()
    return [[offset.offset_s, offset.accuracy_s] for offset in offsets]


def test_clocks_of_other_machines_are_aligned_and_those_of_this_one_left_alone() -> None:
    skews = [5.0, 5.0, -1000.0, 0.25]
    results = run_workers(4, skewed, skews, ["a", "a", "b", "c"])
    assert all(result == results[0] for result in results)
    for (offset_s, accuracy_s), skew_s in zip(results[0], skews, strict=True):
        assert abs(offset_s - (5.0 - skew_s)) <= accuracy_s  # the error is within what is claimed
    assert results[0][1] == [0.0, 0.0]
    assert all(accuracy_s > 0 for _, accuracy_s in results[0][2:])


def test_workers_of_one_machine_share_a_clock() -> None:
    first, second = run_workers(2, lambda _: machine_identity())
    assert first == second == machine_identity()
    assert ClockOffset() == ClockOffset(offset_s=0.0, accuracy_s=0.0)
