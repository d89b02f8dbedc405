"""AWS: the spot instance's interruption notice and its rebalance recommendation, over IMDSv2.

Every 5 s two questions on one connection: ``spot/instance-action`` (404: nothing planned) and
``events/recommendations/rebalance`` (a higher risk: a hint). Stop and terminate come two minutes ahead,
hibernation at once. A token is fetched first, again before it ends, and again whenever a 401 says so.
Source: Amazon EC2 user guide, "Spot Instance interruption notices", "EC2 instance rebalance recommendations",
"Use the Instance Metadata Service".
"""

from __future__ import annotations

import re

import msgspec

from varuna.morph.notices import (
    NoticeKind,
    PreemptionHint,
    PreemptionNotice,
    Reading,
    Report,
    Tell,
)
from varuna.morph.notices_http import Answer, MetadataHttp, Silence
from varuna.morph.notices_source import BASE_URL, MetadataSource
from varuna.morph.notices_time import UtcNow, local_utc_now, parse_utc, seconds_until
from varuna.morph.waiting import Waiting

SOURCE = "aws"
POLL_S = 5.0
PROMISED_S = 120.0
ANSWER_TIMEOUT_S = 5.0
TOKEN_TTL_S = 21600
"""The longest that the service grants."""

TOKEN_PATH = "/latest/api/token"
ACTION_PATH = "/latest/meta-data/spot/instance-action"
REBALANCE_PATH = "/latest/meta-data/events/recommendations/rebalance"
_TOKEN = re.compile(r"[A-Za-z0-9+/=_-]+")
_KINDS = {"terminate": NoticeKind.TERMINATE, "stop": NoticeKind.STOP, "hibernate": NoticeKind.HIBERNATE}


class _Action(msgspec.Struct, frozen=True):
    action: str
    time: str = ""


class _Rebalance(msgspec.Struct, frozen=True, rename="camel"):
    notice_time: str


def read_action(answer: Answer, *, machine: str, utc_now: UtcNow = local_utc_now) -> Reading:
    """What an answer of ``spot/instance-action`` announces. Pure.

    An action of an unknown name counts as a termination, a time that cannot be read as "now": better to leave
    in vain than to be taken by surprise.
    """
    if answer.status == 404:
        return Reading()
    if answer.status != 200:
        return Reading(problem=f"status {answer.status}")
    try:
        action = msgspec.json.decode(answer.body, type=_Action)
    except msgspec.DecodeError as error:
        return Reading(problem=f"an unreadable body ({error})")
    kind = _KINDS.get(action.action, NoticeKind.TERMINATE)
    moment = parse_utc(action.time)
    deadline_s = 0.0
    if moment is not None and kind is not NoticeKind.HIBERNATE:  # hibernation begins with the notice
        deadline_s = seconds_until(moment, server_date=answer.date, utc_now=utc_now, promised_s=PROMISED_S)
    notice = PreemptionNotice(
        machine=machine,
        kind=kind,
        deadline_s=deadline_s,
        source=SOURCE,
        event_id=f"{action.action} {action.time}",
    )
    return Reading(notices=(notice,))


def read_rebalance(answer: Answer, *, machine: str) -> PreemptionHint | str | None:
    """What an answer of ``rebalance`` says: a hint, nothing, or (a string) why it cannot be read. Pure."""
    if answer.status == 404:
        return None
    if answer.status != 200:
        return f"status {answer.status}"
    try:
        rebalance = msgspec.json.decode(answer.body, type=_Rebalance)
    except msgspec.DecodeError as error:
        return f"an unreadable body ({error})"
    return PreemptionHint(machine=machine, source=SOURCE, event_id=f"rebalance {rebalance.notice_time}")


class AwsNotices(MetadataSource):
    """Watches one EC2 instance; see ``MetadataSource``.

    Args:
        machine, report, base_url, waiting, utc_now: as there.
        token_ttl_s: life of a token to ask for, at least 1.
    """

    source = SOURCE
    title = "AWS"
    most_pause_s = POLL_S

    def __init__(
        self,
        machine: str,
        report: Report,
        *,
        base_url: str = BASE_URL,
        waiting: Waiting | None = None,
        utc_now: UtcNow = local_utc_now,
        token_ttl_s: int = TOKEN_TTL_S,
    ) -> None:
        super().__init__(machine, report, base_url=base_url, waiting=waiting, utc_now=utc_now)
        self._token_ttl_s = token_ttl_s
        self._token = ""
        self._token_ends_s = 0.0
        self._last_hint = ""

    async def detect(self) -> bool:
        """True if a token is to be had: no other cloud gives one."""
        async with self.http() as http:
            return await self._fetch_token(http) is None

    async def poll(self, http: MetadataHttp, tell: Tell) -> float:
        """Two questions, every 5 s."""
        await self._ask_both(http, tell)
        return POLL_S

    async def _ask_both(self, http: MetadataHttp, tell: Tell) -> None:
        answer = await self._ask(http, ACTION_PATH)
        if isinstance(answer, Silence):
            self.trouble("silence", answer.reason)
            return
        reading = read_action(answer, machine=self.machine, utc_now=self.utc_now)
        if reading.problem:
            self.trouble(f"action {answer.status}", f"instance-action gave {reading.problem}")
        if answer.status not in (200, 404):
            return
        self.tell_news(reading, tell)
        answer = await self._ask(http, REBALANCE_PATH)
        if isinstance(answer, Silence):
            self.trouble("silence", answer.reason)
            return
        hint = read_rebalance(answer, machine=self.machine)
        if isinstance(hint, str):
            self.trouble(f"rebalance {answer.status}", f"rebalance gave {hint}")
        elif hint is not None and hint.event_id != self._last_hint:
            self._last_hint = hint.event_id
            tell(hint)

    async def _ask(self, http: MetadataHttp, path: str) -> Answer | Silence:
        """One question with a valid token; a 401 is answered with a new token, once."""
        for is_last in (False, True):
            if self.waiting.now_s() >= self._token_ends_s:
                silence = await self._fetch_token(http)
                if silence is not None:
                    return silence
            headers = {"X-aws-ec2-metadata-token": self._token}
            answer = await http.ask("GET", path, headers=headers, timeout_s=ANSWER_TIMEOUT_S)
            if isinstance(answer, Silence) or answer.status != 401 or is_last:
                return answer
            self._token_ends_s = self.waiting.now_s()
        raise AssertionError("the last try returns")

    async def _fetch_token(self, http: MetadataHttp) -> Silence | None:
        asked_s = self.waiting.now_s()
        headers = {"X-aws-ec2-metadata-token-ttl-seconds": str(self._token_ttl_s)}
        answer = await http.ask("PUT", TOKEN_PATH, headers=headers, timeout_s=ANSWER_TIMEOUT_S)
        if isinstance(answer, Silence):
            return answer
        token = answer.body.strip()
        if answer.status != 200 or not _TOKEN.fullmatch(token):
            return Silence(reason=f"no token, status {answer.status}")
        self._token = token
        self._token_ends_s = asked_s + 0.9 * self._token_ttl_s
        return None
