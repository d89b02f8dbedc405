"""Which gradients travel together: a pure choice that every holder makes alike."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

ALIGNMENT_BYTES = 64


@dataclass(frozen=True, kw_only=True)
class GradientSpec:
    """One gradient to be summed over ``holders``.

    Attributes:
        name: the parameter's name.
        holders: ascending ranks of the workers that hold it.
        num_elements: its number of elements.
        element_bytes: bytes of one element.
        kind: gradients of different kinds (dtype, device) never share a bucket.
    """

    name: str
    holders: tuple[int, ...]
    num_elements: int
    element_bytes: int
    kind: str


@dataclass(frozen=True, kw_only=True)
class BucketSpec:
    """Gradients summed by one all-reduce, laid out in one flat tensor.

    Attributes:
        holders: who takes part.
        names: the parameters, in the order in which backward is expected to finish them.
        starts: element at which each begins (aligned).
        first_flag: element from which one has-gradient flag per parameter follows.
    """

    holders: tuple[int, ...]
    names: tuple[str, ...]
    starts: tuple[int, ...]
    first_flag: int

    @property
    def num_elements(self) -> int:
        """Elements of the flat tensor: gradients, padding and flags."""
        return self.first_flag + len(self.names)


def plan_buckets(gradients: Iterable[GradientSpec], bucket_bytes: int) -> tuple[BucketSpec, ...]:
    """Buckets of at most ``bucket_bytes`` (a larger gradient has one of its own), in launch order.

    ``gradients`` come in order of use in forward, so they are taken from the last. Among the holders of one
    tuple the result depends only on the gradients with that tuple, hence it is the same on all of them.
    """
    open_buckets: dict[tuple[tuple[int, ...], str], list[GradientSpec]] = {}
    filled: list[list[GradientSpec]] = []
    for gradient in reversed(tuple(gradients)):
        if len(gradient.holders) < 2:
            continue
        key = (gradient.holders, gradient.kind)
        bucket = open_buckets.get(key)
        if bucket is not None:
            size = sum(member.num_elements * member.element_bytes for member in bucket)
            if size + gradient.num_elements * gradient.element_bytes <= bucket_bytes:
                bucket.append(gradient)
                continue
        open_buckets[key] = [gradient]
        filled.append(open_buckets[key])
    return tuple(_lay_out(bucket) for bucket in filled)


def _lay_out(bucket: list[GradientSpec]) -> BucketSpec:
    starts = []
    end = 0
    for gradient in bucket:
        step = max(1, ALIGNMENT_BYTES // gradient.element_bytes)
        start = -(-end // step) * step
        starts.append(start)
        end = start + gradient.num_elements
    return BucketSpec(
        holders=bucket[0].holders,
        names=tuple(gradient.name for gradient in bucket),
        starts=tuple(starts),
        first_flag=end,
    )
