"""Whether all holders of a parameter reduce the same gradients: else they would wait for one another for ever.

Users freeze parameters, at the start or between steps, and must do the same on every worker. What each of them
reduces is compared at first, and whenever it has changed on a worker; that costs nothing where nothing changes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Mapping, Sequence

from varuna.errors import ProtocolError
from varuna.run.buckets import BucketSpec
from varuna.run.groups import Groups

ToldBy = Callable[[int], str]
"""What another worker's ``note`` was for the step under way, by its rank; waits until it has told."""

_Holders = tuple[int, ...]


class Agreement:
    """What this worker reduces with whom, and what has been agreed on.

    Args:
        holders: of each parameter held here, ascending.
        groups: the generation's.

    Attributes:
        note: what others are to be told.
    """

    def __init__(self, holders: Iterable[_Holders], groups: Groups) -> None:
        self.note = ""
        self._holders = sorted({ranks for ranks in holders if len(ranks) > 1})
        self._groups = groups
        self._digests: Mapping[_Holders, str] = {}
        self._agreed: Mapping[_Holders, str] = {}

    def plan(self, buckets: Mapping[_Holders, Sequence[BucketSpec]]) -> None:
        """From now on these are reduced, by holders, in their order; holders not named reduce nothing."""
        self._digests = {holders: _digest(holders, buckets.get(holders, ())) for holders in self._holders}
        self.note = " ".join(self._digests.values())

    def check(self, told_by: ToldBy | None) -> None:
        """Compare what has changed with its other holders, before gloo would abort the process.

        Only that: others, who share other parameters with them, know of no change.

        Args:
            told_by: see there. Without it all holders meet in their group, also those that saw no change.

        Raises:
            ProtocolError: holders want to reduce different gradients.
        """
        agreed, self._agreed = self._agreed, self._digests
        if agreed is self._digests:
            return
        own = self._groups.world.rank
        for holders, digest in self._digests.items():
            if agreed.get(holders) == digest:
                continue
            if told_by is None:
                told = self._groups.of(holders).all_gather_json(digest)
                odd = [rank for rank, other in zip(holders, told, strict=True) if other != digest]
            else:
                odd = [rank for rank in holders if rank != own and digest not in told_by(rank).split()]
            if odd:
                raise ProtocolError(
                    f"Workers {list(holders)} hold the same parameters but want to reduce different gradients: "
                    f"{odd} differ from worker {own}. requires_grad must be the same on every worker."
                )


def _digest(holders: _Holders, buckets: Sequence[BucketSpec]) -> str:
    plan = [(bucket.names, bucket.num_elements) for bucket in buckets]
    return hashlib.blake2b(repr((holders, plan)).encode(), digest_size=16).hexdigest()
