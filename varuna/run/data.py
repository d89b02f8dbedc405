"""What a stage reads: its pipeline's micro-batches, step after step, loaded ahead in the background.

loader = MicroBatchLoader(dataset, collate_fn, seed=0, batch_size=256, micro_batch_size=8,
                          micro_batch_range=range(0, 16), first_step=0)
micro_batch = loader.get(step_index, k)      # k counts within the global batch; in order, no gaps
loader.close()
"""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset, default_collate

from varuna.errors import ConfigError, DataError, PeerLost
from varuna.order import sample_ids
from varuna.partition.signature import FlatBatch, rebuild
from varuna.run.batchcheck import check_batch
from varuna.run.fetch import CollateFn, Fetcher, FetchRequest, MapDataset
from varuna.run.loader import Source, open_source
from varuna.run.probe import DataProbe, probe_dataset

_NUM_PROBED = 4  # samples read once at the start
_CLOSED = "The generation was ended here before it read a sample."


@dataclass(frozen=True, kw_only=True)
class MicroBatch:
    """One micro-batch, on the CPU (page-locked if the loader's device is a CUDA device).

    Attributes:
        step_index: its step (0 in an evaluation).
        index: k, its place in the global batch (or in the evaluation).
        num_samples: samples in it; the last micro-batch may be short.
        sample_ids: of these, in order.
        flat: its tensors by key (``flat.tensors["input_ids"]``) and its constants.
    """

    step_index: int
    index: int
    num_samples: int
    sample_ids: tuple[int, ...]
    flat: FlatBatch

    @property
    def batch(self) -> Any:
        """As the collate function returned it; every mapping as a plain dict."""
        return rebuild(self.flat.tree, self.flat.tensors)


def check_dataset(dataset: Any, batch_size: int = 1) -> int:
    """The dataset's length, if it can be trained on with this global batch size.

    Raises:
        DataError: samples cannot be read by index or counted, it is empty, or shorter than a global batch.
    """
    kind = type(dataset).__name__
    if isinstance(dataset, DataLoader):
        raise DataError(
            "A DataLoader was given where a dataset is needed. Give its .dataset (and collate_fn); Varuna "
            "makes the batches itself."
        )
    missing = [name for name in ("__len__", "__getitem__") if not hasattr(dataset, name)]
    if isinstance(dataset, IterableDataset) or missing:
        why = "is an IterableDataset" if isinstance(dataset, IterableDataset) else f"has no {missing[0]}"
        raise DataError(
            f"The dataset ({kind}) {why}. Varuna reads samples by index, so that their order is known, each is "
            "used once an epoch, and a step can be repeated on other workers. Give a map-style dataset (with "
            "__len__ and __getitem__): a list of the samples, or an index of where each one lies in its file."
        )
    try:
        length = len(dataset)
    except (TypeError, ValueError, OverflowError) as error:
        raise DataError(
            f"len() of the dataset ({kind}) raised {type(error).__name__}: {error}. Its __len__ must return "
            f"the number of samples, a whole number."
        ) from error
    if length == 0:
        raise DataError(f"The dataset ({kind}) is empty. Check the path or the filter that made it.")
    if length < batch_size:
        raise DataError(
            f"The dataset ({kind}) has {length} samples, fewer than one global batch of {batch_size}. "
            f"Use batch_size={length} or less, or more data."
        )
    return length


def probe_first_batch(
    dataset: MapDataset, collate_fn: CollateFn | None, *, seed: int, batch_size: int, num_samples: int
) -> DataProbe:
    """Read the first samples of step 0 in the calling thread: an example batch, and what it tells.

    Raises:
        DataError: see ``check_dataset`` and ``probe_dataset``.
    """
    length = check_dataset(dataset, batch_size)
    ids = sample_ids(0, length, batch_size, seed)[:num_samples]
    request = FetchRequest(step_index=0, micro_batch_index=0, first_position=0, sample_ids=tuple(ids))
    return probe_dataset(_fetcher(dataset, collate_fn, seed), request)


class MicroBatchLoader:
    """The micro-batches of one pipeline in the order in which its stages run them, without a gap between steps.

    Micro-batch k of step t is samples ``[k·m, (k+1)·m)`` of ``sample_ids(t, ...)``. Nothing is read before
    ``start`` or the first ``get``.

    Args:
        dataset: anything with ``__len__`` and ``__getitem__``.
        collate_fn: samples to a batch; None: torch's ``default_collate``.
        seed: of the order and of random numbers drawn by the dataset.
        batch_size: samples in a global batch.
        micro_batch_size: m.
        micro_batch_range: which k of every step this pipeline runs.
        first_step: the step to begin with.
        num_data_workers: processes that load; 0: in the calling thread; None: a thread in the background, or
            one process if the dataset draws random numbers.
        device: where the stage computes; for a CUDA device batches are put in page-locked memory.

    Raises:
        DataError: see ``check_dataset``.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: CollateFn | None,
        *,
        seed: int,
        batch_size: int,
        micro_batch_size: int,
        micro_batch_range: range,
        first_step: int = 0,
        num_data_workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._length = check_dataset(dataset, batch_size)
        self._seed = seed
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._micro_batches = micro_batch_range
        self._next_step = first_step
        self._reader = _Reader(_fetcher(dataset, collate_fn, seed), num_data_workers, torch.device(device))

    def start(self) -> None:
        """Begin to load, so that the first ``get`` need not wait. Raises DataError as ``get`` does."""
        if not self._reader.is_open:
            self._reader.open(self._requests(self._next_step))

    def get(self, step_index: int, micro_batch_index: int) -> MicroBatch:
        """The next micro-batch, which must be this one (k counts within the global batch); at first, any.

        Raises:
            DataError: the dataset or the collate function raised, or the batch is unlike the first.
            PeerLost: it was closed; the generation has been ended by another thread.
        """
        if not self._reader.is_open:
            self._reader.open(_from(micro_batch_index, self._requests(step_index)))
        return self._reader.take(step_index, micro_batch_index)

    def close(self) -> None:
        """Stop loading, for good and from any thread; no thread or process is left."""
        self._reader.close()

    def _requests(self, step_index: int) -> Iterator[FetchRequest]:
        while True:
            ids = sample_ids(step_index, self._length, self._batch_size, self._seed)
            for k in self._micro_batches:
                first = k * self._micro_batch_size
                yield FetchRequest(
                    step_index=step_index,
                    micro_batch_index=k,
                    first_position=step_index * self._batch_size + first,
                    sample_ids=tuple(ids[first : first + self._micro_batch_size]),
                )
            step_index += 1


class EvaluationLoader:
    """One pass over a dataset in its own order, one pipeline's share of it; each sample once, nothing padded.

    Micro-batch k is samples ``[k·m, (k+1)·m)`` of the dataset. See ``MicroBatchLoader`` for the arguments.

    Attributes:
        micro_batches: the k that this pipeline runs; empty if there are more pipelines than micro-batches.
    """

    def __init__(
        self,
        dataset: MapDataset,
        collate_fn: CollateFn | None,
        *,
        seed: int,
        micro_batch_size: int,
        num_pipelines: int = 1,
        pipeline_index: int = 0,
        num_data_workers: int | None = None,
        device: torch.device | str = "cpu",
    ) -> None:
        self._length = check_dataset(dataset)
        self._micro_batch_size = micro_batch_size
        num_micro_batches = -(-self._length // micro_batch_size)
        self.micro_batches = evaluation_share(num_micro_batches, num_pipelines, pipeline_index)
        self._reader = _Reader(_fetcher(dataset, collate_fn, seed), num_data_workers, torch.device(device))

    def start(self) -> None:
        """Begin to load. Raises DataError as ``get`` does."""
        if not self._reader.is_open:
            self._reader.open(self._requests())

    def get(self, micro_batch_index: int) -> MicroBatch:
        """The next micro-batch, which must be this one; at first, any. Raises as ``MicroBatchLoader.get``."""
        if not self._reader.is_open:
            self._reader.open(_from(micro_batch_index, self._requests()))
        return self._reader.take(0, micro_batch_index)

    def close(self) -> None:
        """Stop loading; no thread or process is left."""
        self._reader.close()

    def _requests(self) -> Iterator[FetchRequest]:
        for k in self.micro_batches:
            first = k * self._micro_batch_size
            ids = range(first, min(first + self._micro_batch_size, self._length))
            yield FetchRequest(step_index=0, micro_batch_index=k, first_position=first, sample_ids=tuple(ids))


def _from(micro_batch_index: int, requests: Iterator[FetchRequest]) -> Iterator[FetchRequest]:
    return itertools.dropwhile(lambda request: request.micro_batch_index != micro_batch_index, requests)


def evaluation_share(num_micro_batches: int, num_pipelines: int, pipeline_index: int) -> range:
    """Which micro-batches of an evaluation a pipeline runs: contiguous, sizes that differ by at most one."""
    start = num_micro_batches * pipeline_index // num_pipelines
    return range(start, num_micro_batches * (pipeline_index + 1) // num_pipelines)


class _Reader:
    """Opens and closes the source, and compares what it gives with what was asked and with the first batch.

    Whoever ends a generation closes it while the training thread may be about to read: it stays closed then.
    """

    def __init__(self, fetcher: Fetcher, num_data_workers: int | None, device: torch.device) -> None:
        if num_data_workers is not None and num_data_workers < 0:
            raise ConfigError(f"num_data_workers={num_data_workers}, but it must be None, 0 or more.")
        self._fetcher = fetcher
        self._num_data_workers = num_data_workers
        self._pin = device.type == "cuda"
        self._lock = threading.Lock()
        self._source: Source | None = None
        self._is_closed = False
        self._probe: DataProbe | None = None

    @property
    def is_open(self) -> bool:
        return self._source is not None

    def open(self, requests: Iterator[FetchRequest]) -> None:
        first = next(requests, None)
        if first is None:
            return
        if self._probe is None:
            self._probe = probe_dataset(
                self._fetcher, replace(first, sample_ids=first.sample_ids[:_NUM_PROBED])
            )
        with self._lock:
            if self._is_closed:
                raise PeerLost(_CLOSED)
            self._source = open_source(
                self._fetcher,
                itertools.chain([first], requests),
                num_processes=self._num_data_workers,
                uses_random=self._probe.uses_random,
                pin=self._pin,
            )

    def take(self, step_index: int, micro_batch_index: int) -> MicroBatch:
        source = self._source
        if source is None:  # another thread has closed it
            raise PeerLost(_CLOSED)
        assert self._probe is not None
        fetched = source.take()
        request = fetched.request
        assert (request.step_index, request.micro_batch_index) == (step_index, micro_batch_index), (
            f"{request} comes next, not step {step_index}, micro-batch {micro_batch_index}"
        )
        num_samples = len(request.sample_ids)
        check_batch(self._probe.layout, fetched.flat, num_samples, request)
        return MicroBatch(
            step_index=step_index,
            index=micro_batch_index,
            num_samples=num_samples,
            sample_ids=request.sample_ids,
            flat=fetched.flat,
        )

    def close(self) -> None:
        self._is_closed = True
        with self._lock:
            source, self._source = self._source, None
        if source is not None:
            source.close()


def _fetcher(dataset: MapDataset, collate_fn: CollateFn | None, seed: int) -> Fetcher:
    return Fetcher(dataset=dataset, collate_fn=default_collate if collate_fn is None else collate_fn, seed=seed)
