"""Waiting as a value that can be handed in: real time, or a test's own."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from typing import Any, Protocol, TypeVar

T = TypeVar("T")


class Waiting(Protocol):
    """What an asyncio shell needs of time. Seconds on a monotonic clock; it is a ``Clock`` too."""

    def now_s(self) -> float:
        """Seconds on a monotonic clock; only differences mean anything."""
        ...

    async def pause(self, seconds: float) -> None:
        """Come back after ``seconds``."""
        ...

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled if it takes longer.

        Raises:
            TimeoutError: it took longer.
        """
        ...


class RealWaiting:
    """The machine's monotonic clock and asyncio's own timers."""

    def now_s(self) -> float:
        """Seconds on ``time.monotonic``."""
        return time.monotonic()

    async def pause(self, seconds: float) -> None:
        """Come back after ``seconds``."""
        await asyncio.sleep(seconds)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, which is cancelled with a ``TimeoutError`` after ``seconds``."""
        async with asyncio.timeout(seconds):
            return await work
