"""Micro-batches: which samples, in which order, equal for every way of loading; errors and leaks."""

import collections
import dataclasses
import itertools
import os
import random
import tempfile
import threading
import time
from collections import Counter

import numpy as np
import psutil
import pytest
import torch
from torch.utils.data import DataLoader, Dataset, IterableDataset, TensorDataset

from varuna.errors import ConfigError, DataError, PeerLost
from varuna.order import sample_ids
from varuna.run.data import (
    EvaluationLoader,
    MicroBatchLoader,
    check_dataset,
    evaluation_share,
    probe_first_batch,
)
from varuna.run.loader import ProcessSource, ThreadSource

WAYS = [None, 0, 1, 2]  # num_data_workers


@pytest.fixture(autouse=True)
def _leaves_nothing_behind():
    threads = set(threading.enumerate())
    files = psutil.Process().num_fds()
    children = psutil.Process().children()  # multiprocessing's resource tracker may be there from another test
    yield
    for thread in set(threading.enumerate()) - threads:
        thread.join(5)  # the feeder of a closed multiprocessing queue ends by itself a moment later
    assert set(threading.enumerate()) <= threads
    assert set(psutil.Process().children()) <= set(children)
    assert psutil.Process().num_fds() <= files + 2  # a pipe that torch keeps for its own


class Squares(Dataset):
    """Sample i is {"x": i, "y": i squared}; counts how often each was read."""

    def __init__(self, length):
        self.length = length
        self.reads = Counter()

    def __len__(self):
        return self.length

    def __getitem__(self, index):
        self.reads[index] += 1
        return {"x": torch.tensor([index]), "y": index * index}


class Noisy(Squares):
    """Draws from all three global generators."""

    def __getitem__(self, index):
        noise = torch.rand(1).item(), float(np.random.rand()), random.random()
        return {"x": torch.tensor([index]), "noise": torch.tensor(noise, dtype=torch.float64)}


def loader(dataset, collate_fn=None, **changes):
    options = {
        "seed": 3,
        "batch_size": 10,
        "micro_batch_size": 4,
        "micro_batch_range": range(3),
        "num_data_workers": 0,
    }
    return MicroBatchLoader(dataset, collate_fn, **{**options, **changes})


def read(data, steps, micro_batches=range(3)):
    try:
        return [data.get(t, k) for t in steps for k in micro_batches]
    finally:
        data.close()


def ids_of(micro_batches):
    return [int(x) for micro_batch in micro_batches for x in micro_batch.flat.tensors["x"]]


# --- which samples --------------------------------------------------------------------------


@pytest.mark.parametrize("num_data_workers", WAYS)
def test_micro_batches_are_slices_of_the_global_batch_over_epoch_ends(num_data_workers):
    got = read(loader(Squares(23), num_data_workers=num_data_workers), range(7))
    assert ids_of(got) == [i for t in range(7) for i in sample_ids(t, 23, 10, 3)]
    assert [micro_batch.num_samples for micro_batch in got] == [4, 4, 2] * 7
    assert [(micro_batch.step_index, micro_batch.index) for micro_batch in got[2:4]] == [(0, 2), (1, 0)]
    last = got[-1]
    assert last.batch["y"].tolist() == [int(x) ** 2 for x in last.batch["x"]]


def test_r36_pipelines_together_read_every_sample_once():
    used = Counter()
    for share in (range(2), range(2, 3)):
        got = read(loader(Squares(20), micro_batch_range=share, num_data_workers=None), range(4), share)
        used.update(ids_of(got))
    assert used == dict.fromkeys(range(20), 2)


@pytest.mark.parametrize("num_data_workers", WAYS)
def test_a_loader_begins_at_any_step(num_data_workers):
    undisturbed = ids_of(read(loader(Squares(23)), range(9)))
    data = loader(Squares(23), first_step=5, num_data_workers=num_data_workers)
    assert ids_of(read(data, range(5, 9))) == undisturbed[50:]


@pytest.mark.parametrize("num_data_workers", WAYS)
@pytest.mark.parametrize("num_read", [0, 1, 4])
def test_a_loader_that_was_closed_begins_nothing_anew(num_data_workers, num_read):
    """Another thread gives the generation up while this one is about to read, within a step or not."""
    data = loader(Squares(23), num_data_workers=num_data_workers)
    for index in range(num_read):
        data.get(index // 3, index % 3)
    data.close()
    with pytest.raises(PeerLost, match="ended here"):
        data.get(num_read // 3, num_read % 3)
    assert not data._reader.is_open


@pytest.mark.parametrize("num_data_workers", [0, None])
def test_a_loader_is_closed_at_any_moment(num_data_workers):
    for index in range(30):
        data = loader(Squares(1000), num_data_workers=num_data_workers)
        closer = threading.Timer(index * 1e-4, data.close)
        closer.start()
        with pytest.raises(PeerLost):
            collections.deque((data.get(count // 3, count % 3) for count in itertools.count()), maxlen=0)
        closer.join()
        assert not data._reader.is_open


def test_a_list_is_a_dataset_and_default_collate_the_default():
    samples = [(torch.full((2,), float(i)), i) for i in range(12)]
    first, *_ = read(loader(samples, batch_size=3, micro_batch_size=3, micro_batch_range=range(1)), [0], [0])
    values, labels = first.batch
    assert labels.tolist() == sample_ids(0, 12, 3, 3)
    assert values.shape == (3, 2)
    assert first.flat.tensors.keys() == {"0", "1"}


def test_the_thread_reads_a_bounded_number_ahead():
    dataset = Squares(1000)
    data = loader(dataset, num_data_workers=None)
    data.start()
    source = data._reader._source
    assert isinstance(source, ThreadSource)
    with source._changed:
        assert source._changed.wait_for(lambda: len(source._ready) == 8, timeout=10)
    for k in range(3):
        data.get(0, k)
    assert len(source._ready) == 5  # enough: the thread sleeps
    data.get(1, 0)
    with source._changed:
        assert source._changed.wait_for(lambda: len(source._ready) == 8, timeout=10)
    data.close()
    # the probe (4 samples), four taken and eight ready micro-batches, at most one more being held
    assert sum(dataset.reads.values()) <= 4 + 4 * 13


# --- random numbers -------------------------------------------------------------------------


def noise_of(micro_batches):
    rows = {}
    for micro_batch in micro_batches:
        for x, noise in zip(micro_batch.batch["x"], micro_batch.batch["noise"], strict=True):
            rows.setdefault(int(x), []).append(tuple(noise.tolist()))
    return rows


def test_random_numbers_of_the_dataset_do_not_depend_on_the_layout():
    reference = noise_of(read(loader(Noisy(23)), range(5)))
    drawn = [value for rows in reference.values() for row in rows for value in row]
    assert len(set(drawn)) == len(drawn)  # new ones for every sample, generator and epoch
    for num_data_workers in (None, 1, 2):
        assert noise_of(read(loader(Noisy(23), num_data_workers=num_data_workers), range(5))) == reference
    other = loader(Noisy(23), micro_batch_size=2, micro_batch_range=range(5))
    assert noise_of(read(other, range(5), range(5))) == reference
    assert noise_of(read(loader(Noisy(23), seed=4), range(5))) != reference


def test_random_numbers_of_the_collate_function_are_keyed_too():
    def masking(samples):
        return {"x": torch.stack([s["x"] for s in samples]), "mask": torch.rand(len(samples), 3) < 0.15}

    want = [m.batch["mask"] for m in read(loader(Squares(23), masking), range(3))]
    data = loader(Squares(23), masking, num_data_workers=None)
    data.start()
    assert isinstance(data._reader._source, ProcessSource)
    got = [m.batch["mask"] for m in read(data, range(3))]
    assert all(torch.equal(a, b) for a, b in zip(want, got, strict=True))


@pytest.mark.parametrize("num_data_workers", WAYS)
@pytest.mark.parametrize("dataset_class", [Squares, Noisy])
def test_the_users_generators_are_left_alone(dataset_class, num_data_workers):
    torch.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    states = torch.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    read(loader(dataset_class(23), num_data_workers=num_data_workers), range(2))
    assert torch.equal(torch.get_rng_state(), states[0])
    assert np.random.get_state()[1].tolist() == states[1]
    assert random.getstate() == states[2]


def test_a_dataset_without_random_numbers_gets_a_thread_one_with_them_a_process():
    for dataset, kind in ((Squares(23), ThreadSource), (Noisy(23), ProcessSource)):
        data = loader(dataset, num_data_workers=None)
        data.start()
        assert isinstance(data._reader._source, kind)
        data.close()


# --- errors ---------------------------------------------------------------------------------


class Failing(Squares):
    """Raises for one sample, after a while."""

    bad = sample_ids(3, 1000, 10, 3)[5]

    def __getitem__(self, index):
        if index == self.bad:
            raise self.error()
        return super().__getitem__(index)

    def error(self):
        return OSError(5, "broken file")


class LocalError(Failing):
    """Raises an exception that cannot be sent between processes."""

    def error(self):
        class Unsendable(Exception):
            def __init__(self, one, two):
                super().__init__(f"{one} and {two}")

        return Unsendable("this", "that")


@pytest.mark.parametrize("num_data_workers", WAYS)
def test_an_exception_in_the_dataset_names_sample_step_and_micro_batch(num_data_workers):
    dataset = Failing(1000)
    with pytest.raises(DataError, match=r"broken file.* step 3, micro-batch 1 \(samples ") as caught:
        read(loader(dataset, num_data_workers=num_data_workers), range(9))
    assert f"dataset[{dataset.bad}] raised OSError" in str(caught.value)
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == 5
    if num_data_workers:
        assert "raise self.error()" in caught.value.__cause__.__notes__[0]
    else:
        assert caught.value.__cause__.__traceback__ is not None


@pytest.mark.parametrize("num_data_workers", [1, 2])
def test_an_exception_that_cannot_be_sent_is_told_as_text(num_data_workers):
    with pytest.raises(DataError, match="Unsendable: this and that") as caught:
        read(loader(LocalError(1000), num_data_workers=num_data_workers), range(9))
    assert "raise self.error()" in caught.value.__notes__[0]


def test_an_exception_stays_and_the_micro_batches_before_it_are_given():
    data = loader(Failing(1000), num_data_workers=None)
    for k in range(3):
        for t in range(1):
            data.get(t, k)
    [data.get(t, k) for t in (1, 2) for k in range(3)]
    data.get(3, 0)
    for _ in range(2):
        with pytest.raises(DataError, match="broken file"):
            data.get(3, 1)
    data.close()


@pytest.mark.parametrize("num_data_workers", [None, 0, 1])
def test_an_exception_in_collate_is_the_cause(num_data_workers):
    def collate(samples):
        if len(samples) == 2 and samples[0]["x"].item() not in sample_ids(0, 23, 10, 3):
            raise KeyError("labels")
        return {"x": torch.stack([sample["x"] for sample in samples])}

    with pytest.raises(DataError, match=r"collate function raised KeyError: 'labels' for step") as caught:
        read(loader(Squares(23), collate, num_data_workers=num_data_workers), range(5))
    assert isinstance(caught.value.__cause__, KeyError)


class Dying(Squares):
    """Ends its process, if that is not the test's."""

    def __init__(self, length):
        super().__init__(length)
        self.parent = os.getpid()

    def __getitem__(self, index):
        if os.getpid() != self.parent:
            os._exit(17)
        return super().__getitem__(index)


def test_a_data_worker_that_dies_is_an_error_not_a_hang():
    with pytest.raises((DataError, RuntimeError), match=r"exited unexpectedly|died"):
        read(loader(Dying(23), num_data_workers=1), range(5))


def test_a_data_worker_ends_when_its_parent_is_killed(tmp_path):
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        tempfile.tempdir = str(tmp_path)  # multiprocessing's folders, which a killed process leaves there
        data = loader(Noisy(23), num_data_workers=1)
        data.get(0, 0)
        os.write(writer, str(psutil.Process().children()[0].pid).encode())
        os.kill(os.getpid(), 9)
    os.waitpid(child, 0)
    data_worker = int(os.read(reader, 20))
    os.close(reader)
    os.close(writer)
    deadline = time.monotonic() + 10
    while psutil.pid_exists(data_worker) and psutil.Process(data_worker).status() != psutil.STATUS_ZOMBIE:
        assert time.monotonic() < deadline, "the data worker outlives its parent"


# --- batches unlike the first ---------------------------------------------------------------


def xy(samples, rows):
    x = torch.stack([sample["x"] for sample in samples])
    return {"x": x, "y": x[:rows]}


@pytest.mark.parametrize(
    ("collate", "message"),
    [
        (lambda s: xy(s, len(s) - 1), r"'y' has shape \(3, 1\), 3 rows for 4 samples"),
        (lambda s: {"x": torch.zeros(7, 2)}, r"no tensor with one row per sample: from 4 samples .*\(7, 2\)"),
        (lambda s: {"x": torch.stack([i["x"] for i in s]).T.squeeze(0).sum()}, "no tensor with one row"),
        (
            lambda s: {"x": torch.zeros(len(s)).to(torch.int32 if len(s) == 2 else torch.int64)},
            "'x' of step 0, micro-batch 2 .* has dtype int32 and 1 dimensions; in the first .*int64",
        ),
        (
            lambda s: {"x": torch.zeros(len(s)), **({"extra": torch.zeros(len(s))} if len(s) == 2 else {})},
            r"other tensors for step 0, micro-batch 2 .* missing \[\], added \['extra'\]",
        ),
        (
            lambda s: {"x": torch.zeros(len(s)), "y": torch.zeros(5 if len(s) == 2 else len(s))},
            r"'y' of step 0, micro-batch 2 .* 5 rows for 2 samples",
        ),
        (lambda s: {"x": np.zeros(len(s))}, "ndarray"),
        (lambda s: "text", "no tensor"),
    ],
)
def test_mismatched_collate_is_an_error_with_the_values(collate, message):
    with pytest.raises(DataError, match=message):
        read(loader(Squares(23), collate), range(2))


def test_tensors_without_rows_and_changing_lengths_are_fine():
    """A square mask with as many rows as samples by chance, a scalar, and a length that changes."""

    def collate(samples):
        x = torch.stack([sample["x"] for sample in samples])
        return {
            "x": x,
            "mask": torch.ones(4, 4),
            "scale": torch.tensor(2.0),
            "pad": x.expand(-1, int(x[0]) + 1),
        }

    got = read(loader(Squares(23), collate), range(3))
    assert ids_of(got) == [i for t in range(3) for i in sample_ids(t, 23, 10, 3)]


@dataclasses.dataclass
class Pair:
    """A batch of its own kind."""

    x: torch.Tensor
    name: str


@pytest.mark.parametrize("num_data_workers", WAYS)
def test_a_batch_keeps_its_kind_on_every_way(num_data_workers):
    def collate(samples):
        return Pair(torch.stack([sample["x"] for sample in samples]), "pair")

    first, *_ = read(loader(Squares(23), collate, num_data_workers=num_data_workers), [0])
    assert isinstance(first.batch, Pair)
    assert first.batch.name == "pair"
    assert first.batch.x.flatten().tolist() == sample_ids(0, 23, 10, 3)[:4]


# --- datasets that cannot be used -----------------------------------------------------------


class Stream(IterableDataset):
    """No index."""

    def __iter__(self):
        return iter(range(3))


class NoLength(Dataset):
    """No length."""

    def __getitem__(self, index):
        return index


@pytest.mark.parametrize(
    ("dataset", "batch_size", "message"),
    [
        (Stream(), 4, "IterableDataset.*by index.*each is used once an epoch.*map-style"),
        (iter([1, 2, 3]), 1, "has no __len__.*map-style"),
        (NoLength(), 1, "has no __len__"),
        ({1, 2}, 1, "has no __getitem__"),
        (DataLoader([1, 2, 3]), 1, r"A DataLoader was given.*\.dataset"),
        ([], 1, "is empty"),
        ([1, 2, 3], 4, "has 3 samples, fewer than one global batch of 4. Use batch_size=3 or less"),
    ],
)
def test_datasets_that_cannot_be_used_are_refused(dataset, batch_size, message):
    with pytest.raises(DataError, match=message):
        check_dataset(dataset, batch_size)
    with pytest.raises(DataError, match=message):
        loader(dataset, batch_size=batch_size)


def test_a_dataset_that_can_be_used_gives_its_length():
    assert check_dataset([1, 2, 3], 3) == 3
    assert check_dataset(TensorDataset(torch.zeros(5, 2)), 2) == 5


def test_a_negative_number_of_workers_is_refused():
    with pytest.raises(ConfigError, match="num_data_workers=-1"):
        loader([1, 2, 3], batch_size=1, num_data_workers=-1)


# --- example batch and evaluation -----------------------------------------------------------


def test_probe_gives_the_first_samples_of_step_0():
    probe = probe_first_batch(Squares(23), None, seed=3, batch_size=10, num_samples=2)
    assert probe.batch["x"].flatten().tolist() == sample_ids(0, 23, 10, 3)[:2]
    assert probe.num_samples == 2
    assert not probe.uses_random
    assert probe_first_batch(Noisy(23), None, seed=3, batch_size=10, num_samples=1).uses_random


@pytest.mark.parametrize("num_data_workers", WAYS)
@pytest.mark.parametrize(("length", "num_pipelines"), [(23, 1), (23, 3), (3, 2), (1, 4)])
def test_an_evaluation_reads_every_sample_once_in_order(length, num_pipelines, num_data_workers):
    seen = []
    for pipeline_index in range(num_pipelines):
        data = EvaluationLoader(
            Squares(length),
            None,
            seed=0,
            micro_batch_size=4,
            num_pipelines=num_pipelines,
            pipeline_index=pipeline_index,
            num_data_workers=num_data_workers,
        )
        data.start()
        seen += ids_of([data.get(k) for k in data.micro_batches])
        data.close()
    assert seen == list(range(length))


def test_evaluation_shares_cover_everything_and_differ_by_one():
    for num_micro_batches in range(12):
        for num_pipelines in range(1, 6):
            shares = [evaluation_share(num_micro_batches, num_pipelines, d) for d in range(num_pipelines)]
            assert [k for share in shares for k in share] == list(range(num_micro_batches))
            assert max(map(len, shares)) - min(map(len, shares)) <= 1


@pytest.mark.gpu
@pytest.mark.parametrize("num_data_workers", WAYS)
def test_batches_for_a_cuda_device_are_page_locked(num_data_workers):
    got = read(loader(Squares(23), num_data_workers=num_data_workers, device="cuda"), range(2))
    assert all(tensor.is_pinned() for m in got for tensor in m.flat.tensors.values())
