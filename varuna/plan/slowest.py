"""What follows from a profile alone, kept for the next choice: a job that morphs chooses with the one it has.

Among it how slow the slowest of P stages must be, for every P: what the bounds of layouts rest on.
"""

from __future__ import annotations

from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from varuna.plan.borders import ANY, ANY_SPLIT, MANY, BorderProblem, BorderTable, Rows
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.tables import Floats, Residents, SectionTable

MOST_KEPT = 32
"""Tables of slowest stages of one profile: device memory, recompute and the range of sizes differ."""

_FREE_LINK = LinkProfile(latency_s=0.0, bytes_per_s=float("inf"))


class ProfileTables:
    """The numbers of one profile as arrays. Nobody may change them: others are using them.

    Attributes:
        sections: costs at any micro-batch size.
        residents: what runs of sections keep and reduce.
    """

    def __init__(self, profile: Profile) -> None:
        self.sections = SectionTable(profile)
        self.residents = Residents(profile)
        self._count = len(profile.sections)
        self._slowest: dict[tuple[tuple[int, ...], bool, float, bool | None], Floats] = {}

    def slowest_s(
        self,
        sizes: NDArray[np.int64],
        depth: int,
        *,
        split: bool,
        memory_bytes: float,
        recompute: bool | None,
    ) -> Floats:
        """``[sizes, at least depth + 1]``: what the slowest of P stages takes at least; infinite: none fit.

        Args:
            sizes: of micro-batches.
            depth: the largest P that is asked for.
            split: for schedules that split backward.
            memory_bytes: of the largest device.
            recompute: of all stages, if fixed.
        """
        key = (tuple(sizes.tolist()), split, memory_bytes, recompute)
        known = self._slowest.get(key)
        if known is None or known.shape[1] <= depth:
            if len(self._slowest) >= MOST_KEPT:
                self._slowest.clear()
            known = self._slowest[key] = np.stack(
                [self._slowest_of(size, depth, split, memory_bytes, recompute) for size in key[0]]
            )
        return known

    def _slowest_of(
        self, size: int, depth: int, split: bool, memory_bytes: float, recompute: bool | None
    ) -> Floats:
        """Of all depths, at one size: with no end of micro-batches, the slowest stage alone counts."""
        problem = BorderProblem(
            runs=self.sections.runs(size, split=split),
            resident_bytes=self.residents.alone_bytes,
            late_s=np.zeros((self._count + 1, self._count + 1)),
            num_micro_batches=MANY,
            schedule=ANY_SPLIT if split else ANY,
            rows=Rows(
                memory_bytes=np.full(depth, memory_bytes),
                speed=np.ones(depth),
                crosses=np.zeros(depth, dtype=bool),
                recompute=recompute,
                within=_FREE_LINK,
                across=_FREE_LINK,
            ),
        )
        slowest_s = BorderTable(problem, tail_weight=0.0).values_s() / MANY
        slowest_s[0] = np.inf
        return slowest_s


@lru_cache(maxsize=2)
def tables_of(profile: Profile) -> ProfileTables:
    """Those of a profile: made once, since a job asks again whenever a worker comes or goes."""
    return ProfileTables(profile)
