"""That a machine will go away: what is told, once, and by whom.

Whoever learns of it (``notices_aws``, ``notices_gcp``, ``notices_azure``, ``notices_signal``) tells one of
three values. Deadlines are durations, counted from the moment a value is told: machines' clocks disagree.
Whoever passes a notice on subtracts the time that it kept it, on its own monotonic clock.
"""

from __future__ import annotations

import enum
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from varuna.events import Event, Notice

BROUGHT_FORWARD_S = 2.0
"""A deadline nearer than told by more than this is told again; less is the rounding of dates to seconds."""


class NoticeKind(enum.Enum):
    """What will happen to the machine."""

    TERMINATE = "terminate"
    STOP = "stop"
    HIBERNATE = "hibernate"
    PREEMPT = "preempt"
    REBOOT = "reboot"
    REDEPLOY = "redeploy"
    SIGNAL = "signal"
    """The process was told to end; nothing is known of the machine."""


@dataclass(frozen=True, kw_only=True)
class PreemptionNotice:
    """A machine goes away: everything on it must have left by the deadline.

    Attributes:
        machine: the agent's name for the machine.
        kind: what will happen to it.
        deadline_s: seconds from the moment this is told; 0 means at any moment now.
        source: ``aws``, ``gcp``, ``azure``, ``signal``.
        event_id: the source's name for it. Told again under the same name, it replaces what was told.
        shared_with: the provider's names of other machines in the same event; acknowledging it lets all of
            them go.
    """

    machine: str
    kind: NoticeKind
    deadline_s: float
    source: str
    event_id: str
    shared_with: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class NoticeWithdrawn:
    """What ``event_id`` announced will not happen."""

    machine: str
    source: str
    event_id: str


@dataclass(frozen=True, kw_only=True)
class PreemptionHint:
    """A higher risk only: save early, do not leave."""

    machine: str
    source: str
    event_id: str


Told = PreemptionNotice | NoticeWithdrawn | PreemptionHint
Tell = Callable[[Told], None]
Report = Callable[[Event], None]
"""Where events for people go: ``EventBus.publish``."""


class NoticeSource(Protocol):
    """One provider's word on one machine."""

    @property
    def source(self) -> str:
        """The provider's name."""
        ...

    async def detect(self) -> bool:
        """True if this provider's metadata service answers here."""
        ...

    async def run(self, tell: Tell) -> None:
        """Tell what the provider announces, each once, until cancelled. Only a ``tell`` that raises ends it."""
        ...

    async def acknowledge(self, event_id: str) -> bool:
        """State is safe on every machine of the event: the provider need not wait for the deadline.

        Returns:
            True if the provider was told; False where it cannot be, or does not know the event any more.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class Reading:
    """What one answer of a provider says.

    Attributes:
        notices: those in force.
        problem: why the answer, or a part of it, could not be read: then what is not in ``notices`` may be in
            force all the same.
    """

    notices: tuple[PreemptionNotice, ...] = ()
    problem: str = ""


@dataclass
class NoticeMemory:
    """What was told, so that it is told once. Pure: time is passed in."""

    _in_force: dict[str, PreemptionNotice] = field(default_factory=dict)
    _ends_s: dict[str, float] = field(default_factory=dict)

    def knows(self, event_id: str) -> bool:
        """True for a notice that is in force."""
        return event_id in self._in_force

    def update(self, reading: Reading, now_s: float) -> list[PreemptionNotice | NoticeWithdrawn]:
        """What to tell after an answer: notices that are new or brought forward, and those that vanished."""
        told: list[PreemptionNotice | NoticeWithdrawn] = []
        for notice in reading.notices:
            ends_s = now_s + notice.deadline_s
            known_end_s = self._ends_s.get(notice.event_id)
            if known_end_s is None or ends_s < known_end_s - BROUGHT_FORWARD_S:
                self._in_force[notice.event_id] = notice
                self._ends_s[notice.event_id] = ends_s
                told.append(notice)
        if not reading.problem:
            told += self._withdraw_all_but({notice.event_id for notice in reading.notices})
        return told

    def acknowledged(self, event_id: str, now_s: float) -> None:
        """Whoever was told has left: that the deadline is now at hand is no news."""
        if event_id in self._ends_s:
            self._ends_s[event_id] = now_s

    def _withdraw_all_but(self, event_ids: set[str]) -> list[NoticeWithdrawn]:
        gone = [notice for event_id, notice in self._in_force.items() if event_id not in event_ids]
        for notice in gone:
            del self._in_force[notice.event_id], self._ends_s[notice.event_id]
        return [
            NoticeWithdrawn(machine=notice.machine, source=notice.source, event_id=notice.event_id)
            for notice in gone
        ]


class Troubles:
    """What goes wrong with a provider's answers, for people: each kind once in the life of a source."""

    def __init__(self, report: Report) -> None:
        self._report = report
        self._seen: set[str] = set()

    def tell(self, kind: str, text: str) -> None:
        """Publish ``text`` unless a trouble of this ``kind`` was published before."""
        if kind not in self._seen:
            self._seen.add(kind)
            self._report(Notice(text=text))


@dataclass
class Backoff:
    """How long to wait before the next try: doubles up to a limit. Pure."""

    first_s: float
    most_s: float
    _next_s: float = 0.0

    def failed(self) -> float:
        """Seconds to wait after one more failure."""
        delay_s = self._next_s or self.first_s
        self._next_s = min(2 * delay_s, self.most_s)
        return delay_s

    def succeeded(self) -> None:
        """Begin anew."""
        self._next_s = 0.0
