"""What all clouds have in common: one metadata service, asked again and again about one machine."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from varuna.morph.notices import NoticeMemory, Reading, Report, Tell, Troubles
from varuna.morph.notices_http import MetadataHttp
from varuna.morph.notices_time import UtcNow, local_utc_now
from varuna.morph.waiting import RealWaiting, Waiting

BASE_URL = "http://169.254.169.254"
"""Documented by all three as fixed: off the cloud no name has to be looked up."""


class MetadataSource(ABC):
    """Watches one machine; a ``NoticeSource``.

    Args:
        machine: the agent's name for this machine.
        report: where troubles are published for people.
        base_url: of the metadata service.
        waiting, utc_now: time.
    """

    title: ClassVar[str]
    """The provider's name, for people."""

    most_pause_s: ClassVar[float]
    """The longest pause between two questions."""

    def __init__(
        self,
        machine: str,
        report: Report,
        *,
        base_url: str = BASE_URL,
        waiting: Waiting | None = None,
        utc_now: UtcNow = local_utc_now,
    ) -> None:
        self.machine = machine
        self.base_url = base_url
        self.waiting = waiting or RealWaiting()
        self.utc_now = utc_now
        self.memory = NoticeMemory()
        self._troubles = Troubles(report)

    def http(self) -> MetadataHttp:
        """A connection to the service, to be entered."""
        return MetadataHttp(self.base_url, self.waiting)

    async def run(self, tell: Tell) -> None:
        """Ask until cancelled."""
        async with self.http() as http:
            while True:
                await self.waiting.pause(await self.poll(http, tell))

    @abstractmethod
    async def poll(self, http: MetadataHttp, tell: Tell) -> float:
        """Ask once; seconds to wait before the next time."""

    async def acknowledge(self, event_id: str) -> bool:
        """Most providers take no acknowledgement."""
        return False

    def tell_news(self, reading: Reading, tell: Tell) -> None:
        """Tell what of a reading was not told yet."""
        for told in self.memory.update(reading, self.waiting.now_s()):
            tell(told)

    def trouble(self, kind: str, what: str) -> None:
        """Publish a trouble, each kind once."""
        self._troubles.tell(
            kind,
            f"{self.title} metadata service at {self.base_url}: {what}. Asking goes on at least every "
            f"{self.most_pause_s:g} s; until it answers, this machine may go without notice.",
        )
