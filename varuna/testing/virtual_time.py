"""Time for tests: ``VirtualTime`` stands still until it is moved, ``ScaledTime`` runs faster than the real one.

Both can be handed to whatever takes a ``Clock`` or a ``Waiting``.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

T = TypeVar("T")


@dataclass(eq=False)
class _Waiter:
    wake_s: float
    is_limit: bool
    woken: asyncio.Event = field(default_factory=asyncio.Event)


class VirtualTime:
    """Seconds that pass only in ``run_until``, which jumps from one waiter's end to the next.

    Sockets are real and take real time, in which virtual time stands still: it moves only when as many tasks as
    the test states are in ``pause``. Limits (``within``) do not count as pausing, but end when they are due.
    """

    def __init__(self) -> None:
        self._now_s = 0.0
        self._waiters: list[_Waiter] = []
        self._num_expired = 0
        self._changed = asyncio.Event()

    def now_s(self) -> float:
        """Virtual seconds since this was made."""
        return self._now_s

    async def pause(self, seconds: float) -> None:
        """Come back after ``seconds`` of virtual time."""
        await self._wait(_Waiter(wake_s=self._now_s + seconds, is_limit=False))

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, cancelled with a ``TimeoutError`` after ``seconds`` of virtual time."""
        self._num_expired = 0
        limit = asyncio.create_task(self._wait(_Waiter(wake_s=self._now_s + seconds, is_limit=True)))
        task = asyncio.create_task(work)
        try:
            await asyncio.wait({task, limit}, return_when=asyncio.FIRST_COMPLETED)
            if task.done():
                return task.result()
            raise TimeoutError
        finally:
            for one in (task, limit):
                one.cancel()
            await asyncio.wait({task, limit})

    async def run_until(self, until_s: float, *, num_pausing: int = 1) -> None:
        """Move to ``until_s`` and stop there with ``num_pausing`` tasks pausing.

        Args:
            until_s: virtual seconds.
            num_pausing: how many tasks pause when nothing is under way: one for every source that is watched
                and every answer that an emulated cloud holds back, since a source then waits for it instead.
        """
        while True:
            await self._until_pausing(num_pausing)
            if min(waiter.wake_s for waiter in self._waiters) > until_s:
                self._now_s = until_s
                return
            self._wake_first()

    async def run_until_done(self, task: asyncio.Task[T], *, num_pausing: int = 1) -> T:
        """Move on until ``task`` is done; the result."""
        task.add_done_callback(lambda _: self._changed.set())
        while True:
            await self._until_pausing(num_pausing, task)
            if task.done():
                return task.result()
            self._wake_first()

    def _wake_first(self) -> None:
        """Move to the next moment at which somebody's waiting ends, and wake all whose does."""
        first_s = min(waiter.wake_s for waiter in self._waiters)
        self._now_s = max(self._now_s, first_s)
        for waiter in [waiter for waiter in self._waiters if waiter.wake_s == first_s]:
            self._num_expired += waiter.is_limit
            self._waiters.remove(waiter)
            waiter.woken.set()

    async def _wait(self, waiter: _Waiter) -> None:
        if not waiter.is_limit:
            self._num_expired = 0
        self._waiters.append(waiter)
        self._changed.set()
        try:
            await waiter.woken.wait()
        finally:
            if waiter in self._waiters:
                self._waiters.remove(waiter)
            self._changed.set()

    async def _until_pausing(self, num_pausing: int, task: asyncio.Task[Any] | None = None) -> None:
        """Return when exactly so many pause and whoever met a limit has gone on, or when ``task`` is done."""
        while True:
            self._changed.clear()
            if task is not None and task.done():
                return
            pausing = sum(not waiter.is_limit for waiter in self._waiters)
            if pausing == num_pausing and self._num_expired == 0:
                return
            await self._changed.wait()


class ScaledTime:
    """The machine's monotonic clock, ``speed`` times as fast."""

    def __init__(self, speed: float) -> None:
        self._speed = speed

    def now_s(self) -> float:
        """Scaled seconds."""
        return time.monotonic() * self._speed

    async def pause(self, seconds: float) -> None:
        """Come back after ``seconds`` of scaled time."""
        await asyncio.sleep(seconds / self._speed)

    async def within(self, seconds: float, work: Coroutine[Any, Any, T]) -> T:
        """The result of ``work``, cancelled with a ``TimeoutError`` after ``seconds`` of scaled time."""
        async with asyncio.timeout(seconds / self._speed):
            return await work
