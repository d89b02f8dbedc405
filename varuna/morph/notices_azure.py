"""Azure: scheduled events, filtered by this machine's own name.

Every second one question on one connection; the first may take two minutes to be answered. Events are broadcast
to the whole scale or availability set, so only those that name this VM count; a Freeze (the VM pauses for
seconds and goes on) is none of ours. Acknowledging an event lets Azure go ahead at once, for every VM it names.
Source: Microsoft Learn, "Azure Metadata Service: Scheduled Events for Linux VMs".
"""

from __future__ import annotations

import re

import msgspec

from varuna.morph.notices import (
    Backoff,
    NoticeKind,
    PreemptionNotice,
    Reading,
    Report,
    Tell,
)
from varuna.morph.notices_http import Answer, MetadataHttp, Silence
from varuna.morph.notices_source import BASE_URL, MetadataSource
from varuna.morph.notices_time import UtcNow, local_utc_now, parse_utc, seconds_until
from varuna.morph.waiting import Waiting

SOURCE = "azure"
POLL_S = 1.0
ANSWER_TIMEOUT_S = 5.0
FIRST_ANSWER_TIMEOUT_S = 180.0
"""The first call switches scheduled events on, which takes up to two minutes."""

EVENTS_PATH = "/metadata/scheduledevents?api-version=2020-07-01"
NAME_PATH = "/metadata/instance/compute/name?api-version=2021-02-01&format=text"
_VM_NAME = re.compile(r"[\w.-]{1,80}")
_HEADERS = {"Metadata": "true"}
_KINDS = {
    "Preempt": NoticeKind.PREEMPT,
    "Terminate": NoticeKind.TERMINATE,
    "Reboot": NoticeKind.REBOOT,
    "Redeploy": NoticeKind.REDEPLOY,
}
_PROMISED_S = {"Preempt": 30.0, "Terminate": 900.0, "Reboot": 900.0, "Redeploy": 600.0}
_IN_FORCE = ("Scheduled", "Started")
_NUM_ACKNOWLEDGE_TRIES = 3


class _Document(msgspec.Struct, frozen=True, rename="pascal"):
    events: list[msgspec.Raw]


class _ScheduledEvent(msgspec.Struct, frozen=True, rename="pascal"):
    event_id: str
    event_type: str
    event_status: str
    resources: list[str]
    not_before: str = ""


def read_events(answer: Answer, *, machine: str, vm_name: str, utc_now: UtcNow = local_utc_now) -> Reading:
    """Which events of an answer of ``scheduledevents`` make this VM leave. Pure.

    An event that has started, or whose ``NotBefore`` is empty or unreadable, may strike at any moment: its
    deadline is 0.
    An event that cannot be read does not hide the others.
    """
    if answer.status != 200:
        return Reading(problem=f"status {answer.status}")
    try:
        raw_events = msgspec.json.decode(answer.body, type=_Document).events
    except msgspec.DecodeError as error:
        return Reading(problem=f"an unreadable body ({error})")
    notices = []
    problem = ""
    for raw in raw_events:
        try:
            event = msgspec.json.decode(raw, type=_ScheduledEvent)
        except msgspec.DecodeError as error:
            problem = f"an unreadable event ({error})"
            continue
        if _concerns(event, vm_name):
            notices.append(_notice(event, answer, machine, vm_name, utc_now))
    return Reading(notices=tuple(notices), problem=problem)


def _concerns(event: _ScheduledEvent, vm_name: str) -> bool:
    names = [name.casefold() for name in event.resources]  # Azure ignores case in names
    is_named = vm_name.casefold() in names
    return is_named and event.event_type in _KINDS and event.event_status in _IN_FORCE


def _notice(
    event: _ScheduledEvent, answer: Answer, machine: str, vm_name: str, utc_now: UtcNow
) -> PreemptionNotice:
    moment = parse_utc(event.not_before)
    deadline_s = 0.0
    if moment is not None and event.event_status != "Started":
        promised_s = _PROMISED_S[event.event_type]
        deadline_s = seconds_until(moment, server_date=answer.date, utc_now=utc_now, promised_s=promised_s)
    return PreemptionNotice(
        machine=machine,
        kind=_KINDS[event.event_type],
        deadline_s=deadline_s,
        source=SOURCE,
        event_id=event.event_id,
        shared_with=tuple(name for name in event.resources if name.casefold() != vm_name.casefold()),
    )


class AzureNotices(MetadataSource):
    """Watches one Azure VM; see ``MetadataSource``."""

    source = SOURCE
    title = "Azure"
    most_pause_s = 5.0

    def __init__(
        self,
        machine: str,
        report: Report,
        *,
        base_url: str = BASE_URL,
        waiting: Waiting | None = None,
        utc_now: UtcNow = local_utc_now,
    ) -> None:
        super().__init__(machine, report, base_url=base_url, waiting=waiting, utc_now=utc_now)
        self._backoff = Backoff(first_s=POLL_S, most_s=self.most_pause_s)
        self._vm_name = ""
        self._timeout_s = FIRST_ANSWER_TIMEOUT_S

    async def detect(self) -> bool:
        """True if the service knows this VM's name."""
        async with self.http() as http:
            return await self._learn_name(http) is None

    async def acknowledge(self, event_id: str) -> bool:
        """Let Azure go ahead with an event now, for every VM that it names: ``shared_with`` too."""
        if not self.memory.knows(event_id):
            return False
        request = {"StartRequests": [{"EventId": event_id}]}
        backoff = Backoff(first_s=0.5, most_s=2.0)
        what = ""
        async with self.http() as http:
            for _ in range(_NUM_ACKNOWLEDGE_TRIES):
                answer = await http.ask(
                    "POST", EVENTS_PATH, headers=_HEADERS, json=request, timeout_s=ANSWER_TIMEOUT_S
                )
                if isinstance(answer, Answer) and answer.status == 200:
                    self.memory.acknowledged(event_id, self.waiting.now_s())
                    return True
                what = answer.reason if isinstance(answer, Silence) else f"status {answer.status}"
                await self.waiting.pause(backoff.failed())
        what = f"event {event_id} could not be acknowledged ({what}), it comes when it is due"
        self.trouble("acknowledge", what)
        return False

    async def poll(self, http: MetadataHttp, tell: Tell) -> float:
        """One question, every second."""
        silence = None if self._vm_name else await self._learn_name(http)
        answer = silence or await http.ask("GET", EVENTS_PATH, headers=_HEADERS, timeout_s=self._timeout_s)
        if isinstance(answer, Silence):
            self.trouble("silence", answer.reason)
            return self._backoff.failed()
        reading = read_events(answer, machine=self.machine, vm_name=self._vm_name, utc_now=self.utc_now)
        if answer.status == 200:
            self._timeout_s = ANSWER_TIMEOUT_S
            self._backoff.succeeded()
        if reading.problem:
            self.trouble(f"events {answer.status}", f"scheduledevents gave {reading.problem}")
        self.tell_news(reading, tell)
        return POLL_S if answer.status == 200 else self._backoff.failed()

    async def _learn_name(self, http: MetadataHttp) -> Silence | None:
        answer = await http.ask("GET", NAME_PATH, headers=_HEADERS, timeout_s=ANSWER_TIMEOUT_S)
        if isinstance(answer, Silence):
            return answer
        name = answer.body.strip()
        if answer.status != 200 or not _VM_NAME.fullmatch(name):
            return Silence(reason=f"no compute/name, status {answer.status}")
        self._vm_name = name
        return None
