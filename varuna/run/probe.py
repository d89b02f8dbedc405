"""What a few samples, read once in the calling thread, tell about a dataset before training starts.

Whether it draws random numbers decides how it is loaded: code that draws from the global generators may not run
in a thread beside the compute thread, whose dropout uses the same generators.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from varuna.partition.signature import flatten_batch
from varuna.run.batchcheck import BatchLayout, layout_of
from varuna.run.fetch import Fetcher, FetchRequest, GlobalStates, preserved_globals


@dataclass(frozen=True, kw_only=True)
class DataProbe:
    """What was found.

    Attributes:
        batch: what the collate function made of the samples; for capture, say.
        num_samples: samples in it.
        layout: what later micro-batches must look like.
        uses_random: the dataset or the collate function drew from a global generator.
    """

    batch: Any
    num_samples: int
    layout: BatchLayout
    uses_random: bool


def probe_dataset(fetcher: Fetcher, request: FetchRequest) -> DataProbe:
    """Read and collate the request's samples; the global generators are left as they were.

    The samples are collated once more without the last one, to see which sizes follow their number.

    Raises:
        DataError: the dataset or the collate function raised, or made something that is not a batch.
    """
    num_samples = len(request.sample_ids)
    with preserved_globals():
        uses_random = False
        samples = []
        for offset in range(num_samples):
            fetcher.seed_sample(request, offset)
            before = GlobalStates.now()
            samples.append(fetcher.sample(request, offset))
            uses_random |= not before.equals(GlobalStates.now())
        fetcher.seed_collate(request)
        before = GlobalStates.now()
        batch = fetcher.collate(request, samples)
        uses_random |= not before.equals(GlobalStates.now())
        fewer = _collate_fewer(fetcher, request, samples[:-1])
    layout = layout_of(
        flatten_batch(batch),
        num_samples,
        flatten_batch(fewer) if fewer is not None else None,
        num_samples - 1,
    )
    return DataProbe(batch=batch, num_samples=num_samples, layout=layout, uses_random=uses_random)


def _collate_fewer(fetcher: Fetcher, request: FetchRequest, samples: list[Any]) -> Any:
    if not samples:
        return None
    fetcher.seed_collate(request)
    try:
        return fetcher.collate_fn(samples)
    except Exception:  # a collate function need not accept fewer samples than it will ever be given
        return None
