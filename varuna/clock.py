"""Time as a value that can be handed in: the real monotonic clock, or a fake one in tests."""

from __future__ import annotations

import time
from typing import Protocol


class Clock(Protocol):
    """What the pure parts need of time: seconds that only grow."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock; only differences mean anything."""
        ...


class MonotonicClock:
    """The machine's monotonic clock."""

    def now_s(self) -> float:
        """Seconds on ``time.monotonic``."""
        return time.monotonic()
