"""GCP: ``instance/preempted``, watched by a long poll: seen at once, at one request in five minutes.

The answer is TRUE or FALSE and says nothing of the time left: 30 s, best effort, unless the machine was made
with a longer preemption notice (``VARUNA_GCP_NOTICE_S`` states it).
Source: Compute Engine documentation, "Spot VMs", "About VM metadata: waiting for change".
"""

from __future__ import annotations

from urllib.parse import quote

from varuna.morph.notices import (
    Backoff,
    NoticeKind,
    NoticeMemory,
    PreemptionNotice,
    Reading,
    Report,
    Tell,
    Troubles,
)
from varuna.morph.notices_http import Answer, MetadataHttp, Silence
from varuna.morph.waiting import RealWaiting, Waiting

SOURCE = "gcp"
BASE_URL = "http://169.254.169.254"
"""Documented as the fixed address of metadata.google.internal: off the cloud no name has to be looked up."""

NOTICE_S = 30.0
LONG_POLL_S = 300
ANSWER_TIMEOUT_S = 5.0
LONG_POLL_TIMEOUT_S = LONG_POLL_S + 30.0
LEAST_PAUSE_S = 1.0
"""After an answer that came at once: some stand-ins do not wait, and must not be asked without pause."""

PATH = "/computeMetadata/v1/instance/preempted"
_HEADERS = {"Metadata-Flavor": "Google"}


def read_preempted(answer: Answer, *, machine: str, notice_s: float = NOTICE_S) -> Reading:
    """What an answer of ``instance/preempted`` announces. Pure."""
    if answer.status != 200:
        return Reading(problem=f"status {answer.status}")
    value = answer.body.strip().upper()
    if value == "FALSE":
        return Reading()
    if value != "TRUE":
        return Reading(problem=f"{answer.body[:40]!r}, neither TRUE nor FALSE")
    notice = PreemptionNotice(
        machine=machine,
        kind=NoticeKind.PREEMPT,
        deadline_s=notice_s,
        source=SOURCE,
        event_id="preempted",
    )
    return Reading(notices=(notice,))


class GcpNotices:
    """Watches one Compute Engine instance.

    Args:
        machine: the agent's name for this machine.
        report: where troubles are published for people.
        base_url: of the metadata service.
        waiting: time.
        notice_s: the notice that the machine was made with.
    """

    source = SOURCE

    def __init__(
        self,
        machine: str,
        report: Report,
        *,
        base_url: str = BASE_URL,
        waiting: Waiting | None = None,
        notice_s: float = NOTICE_S,
    ) -> None:
        self._machine = machine
        self._troubles = Troubles(report)
        self._base_url = base_url
        self._waiting = waiting or RealWaiting()
        self._notice_s = notice_s
        self._memory = NoticeMemory()
        self._backoff = Backoff(first_s=0.5, most_s=5.0)
        self._etag = ""

    async def detect(self) -> bool:
        """True if the service answers and names itself Google's."""
        async with MetadataHttp(self._base_url, self._waiting) as http:
            answer = await http.ask("GET", PATH, headers=_HEADERS, timeout_s=ANSWER_TIMEOUT_S)
        return isinstance(answer, Answer) and answer.headers.get("metadata-flavor") == "Google"

    async def run(self, tell: Tell) -> None:
        """Ask, then wait for changes, until cancelled."""
        async with MetadataHttp(self._base_url, self._waiting) as http:
            while True:
                await self._waiting.pause(await self._poll(http, tell))

    async def acknowledge(self, event_id: str) -> bool:
        """GCP takes no acknowledgement."""
        return False

    async def _poll(self, http: MetadataHttp, tell: Tell) -> float:
        """One question; seconds to wait before the next."""
        asked_s = self._waiting.now_s()
        answer = await self._ask(http)
        if isinstance(answer, Silence):
            # A cut long poll is normal, and nothing is lost: the last etag asks for what was missed.
            delay_s = self._backoff.failed()
            if delay_s >= self._backoff.most_s:
                self._trouble("silence", answer.reason)
            return delay_s
        reading = read_preempted(answer, machine=self._machine, notice_s=self._notice_s)
        if reading.problem:
            if answer.status != 503:  # "try again": part of the service's normal life
                self._trouble(f"status {answer.status}", f"instance/preempted gave {reading.problem}")
            self._etag = ""
            return self._backoff.failed()
        self._backoff.succeeded()
        for told in self._memory.update(reading, self._waiting.now_s()):
            tell(told)
        self._etag = answer.headers.get("etag", "")
        return LEAST_PAUSE_S if self._waiting.now_s() - asked_s < LEAST_PAUSE_S else 0.0

    async def _ask(self, http: MetadataHttp) -> Answer | Silence:
        if not self._etag:
            return await http.ask("GET", PATH, headers=_HEADERS, timeout_s=ANSWER_TIMEOUT_S)
        query = f"?wait_for_change=true&timeout_sec={LONG_POLL_S}&last_etag={quote(self._etag, safe='')}"
        return await http.ask("GET", PATH + query, headers=_HEADERS, timeout_s=LONG_POLL_TIMEOUT_S)

    def _trouble(self, kind: str, what: str) -> None:
        self._troubles.tell(
            kind,
            f"GCP metadata service at {self._base_url}: {what}. Asking goes on at least every "
            f"{self._backoff.most_s:g} s; until it answers, this machine may go without notice.",
        )
