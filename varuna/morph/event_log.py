"""What happened, numbered, for people and tests that follow: kept in memory, the oldest forgotten first."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator, Mapping
from datetime import UTC, datetime

from varuna.morph.views import LoggedEvent

_NUM_KEPT = 20_000


class EventLog:
    """Events of one run; used from one asyncio loop."""

    def __init__(self) -> None:
        self._events: deque[LoggedEvent] = deque(maxlen=_NUM_KEPT)
        self._newest = 0
        self._is_closed = False
        self._changed = asyncio.Event()

    def add(
        self,
        kind: str,
        text: str,
        generation: int,
        *,
        step_index: int | None = None,
        figures: Mapping[str, float] | None = None,
    ) -> None:
        """One more."""
        self._newest += 1
        self._events.append(
            LoggedEvent(
                number=self._newest,
                at=datetime.now(UTC).isoformat(timespec="milliseconds"),
                kind=kind,
                text=text,
                generation=generation,
                step_index=step_index,
                figures=dict(figures or {}),
            )
        )
        self._wake()

    def after(self, number: int) -> list[LoggedEvent]:
        """Those that came after this number and are still known, oldest first."""
        num_new = min(self._newest - number, len(self._events))
        return [self._events[index] for index in range(len(self._events) - num_new, len(self._events))]

    def newest(self, count: int, *, without: str = "") -> list[LoggedEvent]:
        """The last ones, oldest first, leaving out one kind."""
        found: list[LoggedEvent] = []
        for event in reversed(self._events):
            if len(found) == count:
                break
            if event.kind != without:
                found.append(event)
        return found[::-1]

    async def follow(self, number: int) -> AsyncIterator[list[LoggedEvent]]:
        """All after this number, as they come, until the log is closed."""
        while True:
            events = self.after(number)
            if events:
                number = events[-1].number
                yield events
            elif self._is_closed:
                return
            else:
                await self._changed.wait()

    def close(self) -> None:
        """No more will come."""
        self._is_closed = True
        self._wake()

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()
