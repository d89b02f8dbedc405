"""How long the same pass takes at one time and at another, from passes that were timed one after the other."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

HELD_UP = 1.5
"""What took so many times the median was held up by something that has nothing to do with it."""

NUM_QUANTILES = 21
"""In the middle of as many equally likely ranges: the least and the most seen would count too much."""

_ENOUGH = 16
"""With fewer passes nothing is said."""

_LEAST = 0.01
"""A standard deviation below this, as a share of the mean, is none."""

_CORRELATION = (0.01, 0.95)
"""Of two passes in turn, at least and at most: few passes tell it roughly."""


@dataclass(frozen=True, kw_only=True)
class TimedPass:
    """One pass: when it ended, on this process's monotonic clock, and what its tasks took."""

    ended_s: float
    seconds: float


@dataclass(frozen=True, kw_only=True)
class ComputeJitter:
    """See ``Profile.compute_jitter`` and ``compute_jitter_s``."""

    quantiles: tuple[float, ...] = ()
    lasts_s: float = 0.0


def jitter_of(sizes: Sequence[Sequence[TimedPass]]) -> ComputeJitter:
    """From the passes of every micro-batch size, each compared with those of its size, but for the first."""
    ratios: list[tuple[float, float]] = []
    for passes in sizes:
        later = passes[1:]
        limit_s = HELD_UP * statistics.median(one.seconds for one in later) if later else 0.0
        usual = [one for one in later if one.seconds <= limit_s]
        if len(usual) > 1:
            mean_s = statistics.fmean(one.seconds for one in usual)
            ratios += [(one.ended_s, one.seconds / mean_s) for one in usual]
    if len(ratios) < _ENOUGH:
        return ComputeJitter()
    ratios.sort()
    values = [ratio for _, ratio in ratios]
    if statistics.pstdev(values) < _LEAST:
        return ComputeJitter()
    quantiles = np.quantile(values, (np.arange(NUM_QUANTILES) + 0.5) / NUM_QUANTILES)
    between_s = statistics.median(after - before for (before, _), (after, _) in pairwise(ratios))
    least, most = _CORRELATION
    correlation = min(most, max(least, statistics.correlation(values[:-1], values[1:])))
    return ComputeJitter(
        quantiles=tuple((quantiles / _mean(quantiles)).tolist()), lasts_s=between_s / -math.log(correlation)
    )


def joined(found: Sequence[ComputeJitter]) -> ComputeJitter:
    """Of several workers, or parts of the model: the mean of those that have some."""
    some = [each for each in found if each.quantiles]
    if not some:
        return ComputeJitter()
    quantiles = np.mean([each.quantiles for each in some], axis=0)
    return ComputeJitter(
        quantiles=tuple(quantiles.tolist()), lasts_s=statistics.fmean(each.lasts_s for each in some)
    )


def _mean(quantiles: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Of what is drawn between them, evenly."""
    return float(np.mean((quantiles[:-1] + quantiles[1:]) / 2))
