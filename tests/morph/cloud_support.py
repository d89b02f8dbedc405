"""Plays a script to a source in virtual time and says what the source told, and when."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime

from varuna.events import Event
from varuna.morph.notices import NoticeSource, Told
from varuna.testing.cloud_server import EmulatedCloud
from varuna.testing.virtual_time import VirtualTime

START = datetime(2026, 4, 11, 22, 26, 0, tzinfo=UTC)


@dataclass
class Heard:
    told: list[tuple[float, Told]] = field(default_factory=list)
    reports: list[Event] = field(default_factory=list)
    sources: list[NoticeSource] = field(default_factory=list)


MakeSource = Callable[[str, Callable[[Event], None], VirtualTime], NoticeSource]


@contextlib.asynccontextmanager
async def watching(make: MakeSource, url: str, time: VirtualTime) -> AsyncIterator[Heard]:
    """A source at work; what it tells is stamped with the virtual time."""
    heard = Heard()
    source = make(url, heard.reports.append, time)
    heard.sources.append(source)
    task = asyncio.create_task(source.run(lambda one: heard.told.append((time.now_s(), one))))
    try:
        yield heard
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task


def play(cloud: EmulatedCloud, time: VirtualTime, make: MakeSource, until_s: float) -> Heard:
    """Run a source against a cloud's script until a moment."""

    async def run() -> Heard:
        async with cloud, watching(make, cloud.url, time) as heard:
            await time.run_until(until_s)
            return heard

    return asyncio.run(run())
