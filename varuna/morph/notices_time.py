"""Dates in providers' answers, as seconds from now. Pure.

A date is compared with the same answer's own ``Date`` header, so that neither this machine's clock nor its time
zone matters; both have whole seconds. Without that header the local clock must do, and what it says is kept
within the notice that the provider promises: a clock that is off can then bring a deadline forward, never
put it off beyond the promise.
"""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime

UtcNow = Callable[[], datetime]


def local_utc_now() -> datetime:
    """This machine's idea of the time, in UTC."""
    return datetime.now(UTC)


def parse_utc(text: str) -> datetime | None:
    """A date of HTTP (RFC 9110) or ISO 8601 as UTC whatever the local time zone; None if it is neither.

    The day of the week is not looked at: providers' own examples have it wrong.
    """
    for parse in (parsedate_to_datetime, datetime.fromisoformat):
        try:
            moment = parse(text.strip())
            return moment.replace(tzinfo=UTC) if moment.tzinfo is None else moment.astimezone(UTC)
        except (ValueError, OverflowError):
            continue
    return None


def seconds_until(moment: datetime, *, server_date: str, utc_now: UtcNow, promised_s: float) -> float:
    """Seconds from an answer to ``moment``, at least 0.

    Args:
        moment: in UTC.
        server_date: the answer's ``Date`` header, "" if it has none.
        utc_now: the local clock, asked only without such a header.
        promised_s: the provider's usual notice, the most that the local clock may claim.
    """
    answered = parse_utc(server_date)
    if answered is not None:
        return max(0.0, (moment - answered).total_seconds())
    return min(max(0.0, (moment - utc_now()).total_seconds()), promised_s)
