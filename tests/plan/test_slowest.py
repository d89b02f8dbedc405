"""What is kept of a profile between two choices changes none of them."""

from __future__ import annotations

import numpy as np
import pytest

from tests.plan.profiles import make_profile
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster
from varuna.plan.slowest import MOST_KEPT, ProfileTables, tables_of

SIZES = np.array([1, 2, 4])


@pytest.mark.parametrize("split", [False, True])
@pytest.mark.parametrize("recompute", [None, True])
def test_a_deeper_table_says_the_same_of_fewer_stages(split: bool, recompute: bool | None) -> None:
    profile = make_profile(7)
    options = {"split": split, "memory_bytes": 1e9, "recompute": recompute}
    grown = ProfileTables(profile)
    shallow = grown.slowest_s(SIZES, 3, **options)
    deep = grown.slowest_s(SIZES, 7, **options)
    assert deep is grown.slowest_s(SIZES, 2, **options), "it is kept"
    assert shallow.shape == (3, 4)
    assert np.array_equal(deep[:, :4], shallow)
    assert np.array_equal(deep, ProfileTables(profile).slowest_s(SIZES, 7, **options))
    assert np.isinf(deep[:, 0]).all()
    assert (np.diff(deep[:, 1:]) <= 0).all(), "more stages, no slower"


def test_what_was_kept_of_other_clusters_changes_no_choice() -> None:
    profile = make_profile(8)
    shapes = ["1x3", "2x4", "1x7", "3x4", "1x2"]
    kept = [choose_plan(profile, Cluster.parse(shape), batch_size=48) for shape in shapes]
    assert tables_of(profile) is tables_of(make_profile(8)), "equal profiles share them"
    for shape, choice in zip(shapes, kept, strict=True):
        tables_of.cache_clear()
        fresh = choose_plan(profile, Cluster.parse(shape), batch_size=48)
        assert (fresh.plan, fresh.prediction) == (choice.plan, choice.prediction)
        assert fresh.candidates == choice.candidates


def test_no_more_is_kept_than_a_few() -> None:
    tables = ProfileTables(make_profile(3))
    for memory_bytes in range(1, 3 * MOST_KEPT):
        tables.slowest_s(SIZES, 2, split=False, memory_bytes=1e9 + memory_bytes, recompute=None)
        assert len(tables._slowest) <= MOST_KEPT
