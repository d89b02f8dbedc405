"""How much longer messages take because others leave the same machine at the same time.

A stream sends for some share of the time. While ``k`` others of its machine send, too, all ``1 + k`` share what
the machine's link carries, so each takes longer, which makes it likelier that they meet: the slowdowns are the
smallest numbers that agree with each other. On a link that cannot carry all of it every stream always sends.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from varuna.plan.kernel import Floats

_MOST_ROUNDS = 60
_SETTLED = 1e-4


def slowdowns(machine: NDArray[np.int64], share: Floats, streams_alone: float) -> Floats:
    """``[streams]``: at least 1.

    Args:
        machine: ``[streams]``: which one each leaves.
        share: ``[streams]``: of the time in which each sends, if it is alone.
        streams_alone: how many streams at their full speed a machine's link carries.
    """
    count = int(machine.max(initial=0)) + 1
    factor = np.ones_like(share)
    for _ in range(_MOST_ROUNDS):
        active = np.minimum(1.0, share * factor)
        together = 1.0 + np.bincount(machine, active, count)[machine] - active
        before, factor = factor, np.maximum(1.0, together / streams_alone)
        if np.all(factor <= before * (1 + _SETTLED)):
            break
    return np.round(factor, 6)  # streams that are alike have equal ones
