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
    PreemptionNotice,
    Reading,
    Report,
    Tell,
)
from varuna.morph.notices_http import Answer, MetadataHttp, Silence
from varuna.morph.notices_source import BASE_URL, MetadataSource
from varuna.morph.waiting import Waiting

SOURCE = "gcp"
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


class GcpNotices(MetadataSource):
    """Watches one Compute Engine instance; see ``MetadataSource``.

    Args:
        machine, report, base_url, waiting: as there.
        notice_s: the notice that the machine was made with.
    """

    source = SOURCE
    title = "GCP"
    most_pause_s = 5.0

    def __init__(
        self,
        machine: str,
        report: Report,
        *,
        base_url: str = BASE_URL,
        waiting: Waiting | None = None,
        notice_s: float = NOTICE_S,
    ) -> None:
        super().__init__(machine, report, base_url=base_url, waiting=waiting)
        self._notice_s = notice_s
        self._backoff = Backoff(first_s=0.5, most_s=self.most_pause_s)
        self._etag = ""

    async def detect(self) -> bool:
        """True if the service answers and names itself Google's."""
        async with self.http() as http:
            answer = await http.ask("GET", PATH, headers=_HEADERS, timeout_s=ANSWER_TIMEOUT_S)
        return isinstance(answer, Answer) and answer.headers.get("metadata-flavor") == "Google"

    async def poll(self, http: MetadataHttp, tell: Tell) -> float:
        """One question, then a wait for changes."""
        asked_s = self.waiting.now_s()
        answer = await self._ask(http)
        if isinstance(answer, Silence):
            # A cut long poll is normal, and nothing is lost: the last etag asks for what was missed.
            delay_s = self._backoff.failed()
            if delay_s >= self._backoff.most_s:
                self.trouble("silence", answer.reason)
            return delay_s
        reading = read_preempted(answer, machine=self.machine, notice_s=self._notice_s)
        if reading.problem:
            if answer.status != 503:  # "try again": part of the service's normal life
                self.trouble(f"status {answer.status}", f"instance/preempted gave {reading.problem}")
            self._etag = ""
            return self._backoff.failed()
        self._backoff.succeeded()
        self.tell_news(reading, tell)
        self._etag = answer.headers.get("etag", "")
        return LEAST_PAUSE_S if self.waiting.now_s() - asked_s < LEAST_PAUSE_S else 0.0

    async def _ask(self, http: MetadataHttp) -> Answer | Silence:
        if not self._etag:
            return await http.ask("GET", PATH, headers=_HEADERS, timeout_s=ANSWER_TIMEOUT_S)
        query = f"?wait_for_change=true&timeout_sec={LONG_POLL_S}&last_etag={quote(self._etag, safe='')}"
        return await http.ask("GET", PATH + query, headers=_HEADERS, timeout_s=LONG_POLL_TIMEOUT_S)
