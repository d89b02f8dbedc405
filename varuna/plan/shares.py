"""How many micro-batches each pipeline gets, where pipelines are not equally fast."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Micro-batches of pipelines.

    Attributes:
        most: per kind of pipeline, of those that get most.
        num_fewer: how many pipelines get one fewer than that.
    """

    most: tuple[int, ...]
    num_fewer: int


def share_out(total: int, counts: Sequence[int], each_s: Sequence[float], rest_s: Sequence[float]) -> Shares:
    """Micro-batches of each pipeline, so that the last to finish is as early as it can be.

    Args:
        total: micro-batches; at least one for each pipeline.
        counts: pipelines of each kind.
        each_s: per kind, seconds per micro-batch.
        rest_s: per kind, seconds besides.
    """
    if len(counts) == 1:
        share = -(-total // counts[0])
        return Shares(most=(share,), num_fewer=share * counts[0] - total)
    low_s, high_s = 0.0, max(rest_s) + max(each_s) * (total + 1)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        shares = _done_by(middle_s, each_s, rest_s)
        if sum(count * share for count, share in zip(counts, shares, strict=True)) >= total:
            high_s = middle_s
        else:
            low_s = middle_s
    shares = _done_by(high_s, each_s, rest_s)
    given = sum(count * share for count, share in zip(counts, shares, strict=True))
    return Shares(most=tuple(shares), num_fewer=given - total)


def _done_by(time_s: float, each_s: Sequence[float], rest_s: Sequence[float]) -> list[int]:
    """Micro-batches that a pipeline of each kind gets through by then, but at least one."""
    return [max(1, int((time_s - rest) / each)) for rest, each in zip(rest_s, each_s, strict=True)]
