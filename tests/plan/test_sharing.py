"""How streams that leave one machine slow each other down."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.plan.sharing import slowdowns


def of(shares: list[float], streams_alone: float = 1.0) -> list[float]:
    return slowdowns(np.zeros(len(shares), dtype=np.int64), np.array(shares), streams_alone).tolist()


def test_a_stream_alone_is_not_slowed() -> None:
    assert of([1.0]) == [1.0]
    assert of([]) == []
    assert slowdowns(np.array([0, 3]), np.array([1.0, 1.0]), 1.0).tolist() == [1.0, 1.0], "two machines"


@pytest.mark.parametrize(
    ("shares", "expected"),
    [
        ([0.01, 0.01], [1.01, 1.01]),  # they hardly ever meet
        ([0.25, 0.25], [4 / 3, 4 / 3]),  # each is there for a third of the time
        ([0.5, 0.5], [2.0, 2.0]),  # just all that the link carries
        ([0.5] * 4, [4.0] * 4),  # twice that: all always send
        ([1.0, 0.0], [1.0, 2.0]),
    ],
)
def test_streams_that_meet(shares: list[float], expected: list[float]) -> None:
    assert of(shares) == pytest.approx(expected, rel=0.02)


def test_a_link_that_carries_several_streams() -> None:
    assert of([1.0, 1.0], streams_alone=2.0) == [1.0, 1.0]
    assert of([1.0] * 4, streams_alone=2.0) == pytest.approx([2.0] * 4)


@given(st.lists(st.floats(0.01, 1.0), min_size=1, max_size=12))
def test_no_link_carries_more_than_it_can(shares: list[float]) -> None:
    factors = of(shares)
    stretched = max(1.0, *(share * factor for share, factor in zip(shares, factors, strict=True)))
    assert sum(shares) / stretched <= 1.05
    assert all(1.0 <= factor <= len(shares) + 1e-6 for factor in factors)
