"""The order of samples: a permutation per epoch, the same forever, independent of workers and interruptions."""

import hashlib
import math
import random
import time
from collections import Counter
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.errors import ConfigError, DataError
from varuna.order import sample_ids


def steps(first, end, length, batch_size, seed):
    return [sample_id for t in range(first, end) for sample_id in sample_ids(t, length, batch_size, seed)]


def test_golden_ids_never_change():
    """These ids are what every earlier run used; a change here breaks every audit and every resumed run."""
    assert sample_ids(0, 10, 10, 0) == [1, 6, 7, 5, 9, 2, 8, 0, 3, 4]
    assert sample_ids(7, 1000, 8, 1234) == [51, 717, 824, 626, 530, 427, 457, 45]
    assert sample_ids(3, 7, 16, -5) == [0, 5, 2, 0, 4, 6, 3, 1, 2, 3, 6, 4, 0, 1, 5, 4]
    assert sample_ids(10**6, 10**12 + 39, 6, 2**40) == [
        735638699193,
        246007615309,
        533470296439,
        110642996286,
        362645541453,
        700108515220,
    ]
    many = repr([sample_ids(t, 997, 100, 42) for t in range(50)])
    assert hashlib.sha256(many.encode()).hexdigest() == (
        "7149201e6a31feb6fa57aef28346e35bb9742c334dab9244b53188f7e545c4e8"
    )


@given(length=st.integers(1, 5000), epoch=st.integers(0, 10**9), seed=st.integers(-(2**70), 2**70))
@settings(max_examples=80, deadline=None)
def test_an_epoch_is_a_permutation_for_any_length(length, epoch, seed):
    assert sorted(sample_ids(epoch, length, length, seed)) == list(range(length))


@given(
    length=st.integers(1, 60), batch_size=st.integers(1, 150), first=st.integers(0, 50), seed=st.integers(0, 9)
)
@settings(max_examples=60, deadline=None)
def test_any_batch_size_walks_the_same_row_epoch_by_epoch(length, batch_size, first, seed):
    """One row of samples: batches are slices of it, whatever their size, and may span several epochs."""
    ids = sample_ids(first, length, batch_size, seed)
    start = first * batch_size
    row = [sample_ids(position, length, 1, seed)[0] for position in range(start, start + batch_size)]
    assert ids == row


@pytest.mark.parametrize("length", [2**31, 2**32 + 1, 10**12, 2**62])
def test_any_length_without_building_the_order(length):
    ids = sample_ids(12345, length, 4096, 7)
    assert len(set(ids)) == 4096
    assert all(0 <= sample_id < length for sample_id in ids)
    assert all(type(sample_id) is int for sample_id in ids)


def test_8192_ids_take_a_few_milliseconds():
    durations = []
    for t in range(10):
        start = time.perf_counter()
        sample_ids(t, 10**9, 8192, 0)
        durations.append(time.perf_counter() - start)
    assert min(durations) < 0.005


# --- looks random ---------------------------------------------------------------------------


def chi_squared_is_usual(counts, num_cells, num_draws):
    """Within 5 standard deviations of its mean, either way."""
    expected = num_draws / num_cells
    chi = sum((counts.get(cell, 0) - expected) ** 2 / expected for cell in counts)
    chi += (num_cells - len(counts)) * expected
    degrees = num_cells - 1
    return abs(chi - degrees) < 5 * math.sqrt(2 * degrees) + 1


@pytest.mark.parametrize("length", [2, 3, 4, 5, 6])
def test_all_orders_of_a_few_samples_are_equally_likely(length):
    num_epochs = 2000
    counts = Counter(tuple(sample_ids(epoch, length, length, 3)) for epoch in range(num_epochs))
    assert chi_squared_is_usual(counts, math.factorial(length), num_epochs)


@pytest.mark.parametrize("length", [100, 1025])
def test_every_place_holds_every_part_of_the_dataset_equally_often(length):
    """First, middle and last place of 1000 epochs, ids in ten parts."""
    for place in (0, length // 2, length - 1):
        ids = [sample_ids(epoch * length + place, length, 1, 0)[0] for epoch in range(1000)]
        parts = Counter(10 * sample_id // length for sample_id in ids)
        assert chi_squared_is_usual(parts, 10, 1000)


def test_neighbours_in_the_order_are_not_neighbours_in_the_dataset():
    ids = sample_ids(0, 10**6, 20000, 0)
    gaps = Counter(10 * ((second - first) % 10**6) // 10**6 for first, second in pairwise(ids))
    assert chi_squared_is_usual(gaps, 10, len(ids) - 1)
    assert sum(abs(second - first) == 1 for first, second in pairwise(ids)) <= 3


def test_epochs_and_seeds_give_unrelated_orders():
    """Two unrelated orders of n samples agree in about one place, and correlate like noise."""
    length = 2000
    orders = [sample_ids(epoch, length, length, seed) for seed in (0, 1, 2**32) for epoch in (0, 1, 2)]
    for i, one in enumerate(orders):
        for other in orders[:i]:
            assert sum(a == b for a, b in zip(one, other, strict=True)) < 10
            centre = (length - 1) / 2
            covariance = sum((a - centre) * (b - centre) for a, b in zip(one, other, strict=True))
            variance = sum((a - centre) ** 2 for a in one)
            assert abs(covariance / variance) < 5 / math.sqrt(length)


# --- cases ----------------------------------------------------------------------------------


def test_r32_after_an_interruption_exactly_the_unused_samples_remain():
    length, batch_size, seed = 103, 10, 5
    epoch_end = 31  # steps 0..30 hold 310 positions: into the fourth epoch
    for stopped_at in (1, 11, 25, 30):
        before = steps(0, stopped_at, length, batch_size, seed)
        after = steps(stopped_at, epoch_end, length, batch_size, seed)
        third_epoch = (before + after)[2 * length : 3 * length]
        assert sorted(third_epoch) == list(range(length))


def test_r33_the_skip_is_applied_once_not_in_every_epoch():
    length, batch_size, seed = 50, 10, 1
    resumed = steps(3, 15, length, batch_size, seed)  # resumed at step 3 of the first epoch
    assert len(resumed[:20]) == 20
    assert sorted(resumed[20:70]) == list(range(length))  # the second epoch is whole
    assert sorted(resumed[70:120]) == list(range(length))  # so is the third


def shares(ids, micro_batch_size, num_pipelines):
    """A global batch's ids as the pipelines read them: contiguous runs of micro-batches."""
    micro_batches = [ids[i : i + micro_batch_size] for i in range(0, len(ids), micro_batch_size)]
    borders = [len(micro_batches) * d // num_pipelines for d in range(num_pipelines + 1)]
    return [
        [sample_id for micro_batch in micro_batches[begin:end] for sample_id in micro_batch]
        for begin, end in pairwise(borders)
    ]


def test_r34_pipelines_4_2_4_use_the_same_samples_as_an_undisturbed_run():
    length, batch_size, seed = 97, 12, 9
    undisturbed = steps(0, 24, length, batch_size, seed)
    morphed = []
    for t in range(24):
        num_pipelines = 2 if 8 <= t < 16 else 4
        read = shares(sample_ids(t, length, batch_size, seed), 2, num_pipelines)
        morphed += [sample_id for share in read for sample_id in share]
    assert morphed == undisturbed


@pytest.mark.parametrize("num_pipelines", [1, 2, 3, 4, 5, 7])
def test_r36_no_sample_is_padded_or_dropped_for_any_number_of_pipelines(num_pipelines):
    length, batch_size, seed = 61, 13, 2
    used = Counter()
    for t in range(61):  # 61 steps of 13 samples: exactly 13 epochs
        for share in shares(sample_ids(t, length, batch_size, seed), 2, num_pipelines):
            used.update(share)
    assert used == dict.fromkeys(range(length), 13)


# --- errors and purity ----------------------------------------------------------------------


@pytest.mark.parametrize("length", [0, -1, 2**62 + 1])
def test_lengths_without_an_order_are_refused(length):
    with pytest.raises(DataError, match=rf"dataset_length={length}\b"):
        sample_ids(0, length, 4, 0)


def test_negative_step_and_empty_batch_are_refused():
    with pytest.raises(ConfigError, match="step_index=-1"):
        sample_ids(-1, 10, 4, 0)
    with pytest.raises(ConfigError, match="batch_size=0"):
        sample_ids(0, 10, 0, 0)
    with pytest.raises(TypeError):
        sample_ids(0, 10, 2.5, 0)


def test_the_global_generators_play_no_part():
    random.seed(1)
    state = random.getstate()
    first = sample_ids(4, 1000, 32, 0)
    assert random.getstate() == state
    random.seed(2)
    assert sample_ids(4, 1000, 32, 0) == first
