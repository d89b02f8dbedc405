"""One micro-batch out of the user's dataset: which samples, seeded how, and what went wrong where.

Random numbers that the dataset or the collate function draw from the global generators of torch, NumPy or
``random`` are seeded by (seed, global position of the sample), so an augmentation does not depend on the
layout, and every stage that reads a sample reads the same one.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import torch

from varuna.errors import DataError
from varuna.partition.signature import FlatBatch, flatten_batch
from varuna.run.random import Domain, seed_for

CollateFn = Callable[[list[Any]], Any]


class MapDataset(Protocol):
    """What a dataset must offer: samples by index. A list, a torch ``Dataset``, a Hugging Face dataset do."""

    def __len__(self) -> int:
        """Number of samples."""
        ...

    def __getitem__(self, index: int, /) -> Any:
        """The sample with this id."""
        ...


@dataclass(frozen=True, kw_only=True)
class FetchRequest:
    """Which samples form one micro-batch.

    Attributes:
        step_index: the step, or 0 in an evaluation.
        micro_batch_index: place in the global batch (or in the evaluation).
        first_position: place of its first sample in the endless row of samples; the others follow.
        sample_ids: ids in the dataset, in order.
    """

    step_index: int
    micro_batch_index: int
    first_position: int
    sample_ids: tuple[int, ...]

    def __str__(self) -> str:
        return (
            f"step {self.step_index}, micro-batch {self.micro_batch_index} (samples {_some(self.sample_ids)})"
        )


@dataclass(frozen=True, kw_only=True)
class Fetcher:
    """The user's dataset and collate function, called for one micro-batch at a time."""

    dataset: MapDataset
    collate_fn: CollateFn
    seed: int

    def fetch(self, request: FetchRequest, *, seeded: bool) -> FlatBatch:
        """The collated micro-batch by key.

        ``seeded`` sets the global generators before every sample and before the collate function, and leaves
        them so.

        Raises:
            DataError: the user's code raised (its exception is the cause), or made something that is no batch.
        """
        samples = []
        for offset in range(len(request.sample_ids)):
            if seeded:
                self.seed_sample(request, offset)
            samples.append(self.sample(request, offset))
        if seeded:
            self.seed_collate(request)
        return flatten_batch(self.collate(request, samples))

    def sample(self, request: FetchRequest, offset: int) -> Any:
        """One sample of a request. Raises DataError with the dataset's exception as the cause."""
        sample_id = request.sample_ids[offset]
        try:
            return self.dataset[sample_id]
        except Exception as error:
            raise DataError(
                f"dataset[{sample_id}] raised {_name(error)} for {request}. "
                "The same index shows it without Varuna; repair that sample or leave it out of the dataset."
            ) from error

    def collate(self, request: FetchRequest, samples: list[Any]) -> Any:
        """The collate function's answer. Raises DataError with its exception as the cause."""
        try:
            return self.collate_fn(samples)
        except Exception as error:
            raise DataError(
                f"The collate function raised {_name(error)} for {request}. Samples of different shapes or "
                "types need a collate function of their own: Varuna(..., collate_fn=...)."
            ) from error

    def seed_sample(self, request: FetchRequest, offset: int) -> None:
        """Seed the global generators for one sample of a request."""
        seed_globals(self._key(request.first_position + offset, 0))

    def seed_collate(self, request: FetchRequest) -> None:
        """Seed the global generators for the collate function."""
        seed_globals(self._key(request.first_position, 1))

    def _key(self, position: int, place: int) -> int:
        return seed_for(self.seed, 0, position, place, domain=Domain.DATA)


def seed_globals(value: int) -> None:
    """Seed the default generators of torch (CPU), NumPy and ``random``."""
    torch.default_generator.manual_seed(value)
    np.random.seed(value % 2**32)
    random.seed(value)


@dataclass(frozen=True)
class GlobalStates:
    """States of the default generators of torch (CPU), NumPy and ``random``."""

    of_torch: torch.Tensor
    of_numpy: dict[str, Any]
    of_random: tuple[Any, ...]

    @staticmethod
    def now() -> GlobalStates:
        """The present states."""
        of_numpy = np.random.get_state(legacy=False)
        assert isinstance(of_numpy, dict)
        return GlobalStates(torch.default_generator.get_state(), of_numpy, random.getstate())

    def restore(self) -> None:
        """Make these the present states."""
        torch.default_generator.set_state(self.of_torch)
        np.random.set_state(self.of_numpy)
        random.setstate(self.of_random)

    def equals(self, other: GlobalStates) -> bool:
        """Whether nothing was drawn between the two."""
        mine, theirs = self.of_numpy["state"], other.of_numpy["state"]
        return (
            torch.equal(self.of_torch, other.of_torch)
            and mine["pos"] == theirs["pos"]
            and np.array_equal(mine["key"], theirs["key"])
            and self.of_numpy["has_gauss"] == other.of_numpy["has_gauss"]
            and self.of_random == other.of_random
        )


@contextlib.contextmanager
def preserved_globals() -> Iterator[None]:
    """Give the default generators back as they were."""
    states = GlobalStates.now()
    try:
        yield
    finally:
        states.restore()


def _name(error: BaseException) -> str:
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def _some(ids: Sequence[int]) -> str:
    """Ids as text, the middle left out of long lists."""
    if len(ids) <= 8:
        return ", ".join(map(str, ids))
    return f"{', '.join(map(str, ids[:4]))}, ... {ids[-1]}: {len(ids)} in all"
