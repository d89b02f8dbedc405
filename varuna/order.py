"""Which samples form which global batch: a pure function of four numbers.

The samples of the whole job stand in one endless row. Global batch ``t`` is positions
``[t·batch_size, (t+1)·batch_size)`` of it; position ``p`` lies in epoch ``p // dataset_length``, and within an
epoch every sample stands exactly once, in an order keyed by (seed, epoch). So a batch may span two epochs,
nothing is padded or dropped, and neither the number of workers nor an interruption changes what comes next.

The order of an epoch is a keyed permutation that can be asked for at any position without being built: a
Feistel network over ``Z_a × Z_b`` with ``a·b`` just above the dataset's length, walked again while it lands
outside (Black and Rogaway, "Ciphers with Arbitrary Finite Domains", 2002: generalised Feistel, cycle walking).
Time and memory are those of the batch, for a dataset of any length. It uses only SHAKE-256 and integers modulo
2**64, so the ids are the same for every version of Python, NumPy and PyTorch, and they never change.
"""

from __future__ import annotations

import hashlib
import math
import operator
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from varuna.errors import ConfigError, DataError

_NUM_ROUNDS = 20  # below 16, all orders of 5 or 6 samples are not yet equally likely (chi-squared)
_MAX_LENGTH = 2**62  # keeps a·b and every sum below 2**64

_UInt64Array = npt.NDArray[np.uint64]


def sample_ids(step_index: int, dataset_length: int, batch_size: int, seed: int) -> list[int]:
    """Ids of the samples that form one step's global batch, in their order in it.

    Args:
        step_index: the step, from 0 over the life of the job.
        dataset_length: number of samples, ``len(dataset)``.
        batch_size: samples in a global batch; may exceed the dataset's length (it then spans several epochs).
        seed: any integer.

    Returns:
        ``batch_size`` ids, each in ``[0, dataset_length)``; micro-batch k of the step is ``[k·m, (k+1)·m)``.

    Raises:
        DataError: the dataset has no samples, or more than 2**62.
        ConfigError: a negative step or a batch size below 1.
    """
    step_index, dataset_length, batch_size, seed = map(
        operator.index, (step_index, dataset_length, batch_size, seed)
    )
    if not 1 <= dataset_length <= _MAX_LENGTH:
        raise DataError(
            f"dataset_length={dataset_length}, but an order needs between 1 and 2**62 samples. "
            "Give a dataset whose len() is at least 1."
        )
    if step_index < 0:
        raise ConfigError(f"step_index={step_index}, but steps count from 0.")
    if batch_size < 1:
        raise ConfigError(f"batch_size={batch_size}, but a global batch needs at least 1 sample.")
    ids: list[int] = []
    position = step_index * batch_size
    end = position + batch_size
    while position < end:
        epoch_index, offset = divmod(position, dataset_length)
        count = min(end - position, dataset_length - offset)
        ids += _epoch_order(offset, count, dataset_length, epoch_index, seed).tolist()
        position += count
    return ids


def digest_of(ids: Sequence[int]) -> str:
    """SHA-256 of sample ids, as 64-bit little-endian numbers in their order."""
    return hashlib.sha256(np.asarray(ids, dtype="<u8").tobytes()).hexdigest()


def _epoch_order(offset: int, count: int, length: int, epoch_index: int, seed: int) -> _UInt64Array:
    """Ids at places ``[offset, offset + count)`` of one epoch; uint64, shape (count,)."""
    num_rows = math.isqrt(length - 1) + 1
    num_columns = -(-length // num_rows)
    keys = _round_keys(seed, epoch_index)
    ids = np.arange(offset, offset + count, dtype=np.uint64)
    outside = np.arange(count)
    while outside.size:
        walked = _feistel(ids[outside], np.uint64(num_rows), np.uint64(num_columns), keys)
        ids[outside] = walked
        outside = outside[walked >= np.uint64(length)]
    return ids


def _round_keys(seed: int, epoch_index: int) -> _UInt64Array:
    """One 64-bit key a round; uint64, shape (_NUM_ROUNDS,)."""
    text = f"varuna order 1: seed {seed}, epoch {epoch_index}"
    digest = hashlib.shake_256(text.encode()).digest(8 * _NUM_ROUNDS)
    return np.frombuffer(digest, dtype="<u8").astype(np.uint64)


def _feistel(
    values: _UInt64Array, num_rows: np.uint64, num_columns: np.uint64, keys: _UInt64Array
) -> _UInt64Array:
    """A bijection of ``[0, num_rows·num_columns)``: row and column in turn shift by a hash of the other."""
    rows, columns = values // num_columns, values % num_columns
    for row_key, column_key in zip(keys[0::2], keys[1::2], strict=True):
        rows = (rows + _mix(columns + row_key) % num_rows) % num_rows
        columns = (columns + _mix(rows + column_key) % num_columns) % num_columns
    mixed: _UInt64Array = rows * num_columns + columns
    return mixed


def _mix(values: _UInt64Array) -> _UInt64Array:
    """The finaliser of SplitMix64: every bit of the input flips half of the output's bits."""
    values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return values ^ (values >> np.uint64(31))
