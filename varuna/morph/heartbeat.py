"""Who is alive, from heartbeats. Pure: the time of the manager's monotonic clock is passed in.

A worker is known by its name and incarnation, a text that is never used twice. The manager says which
incarnation it expects under a name; every other one, and what was fenced, is refused. A worker that comes back
after a freeze learns it from the refusal of its next beat, and asks for a new incarnation.

Silence is measured in time that the manager itself was awake: between two calls at most ``most_gap_s`` counts.
If the manager was frozen or starved, or its clock jumped, nobody is condemned for beats that wait to be read.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Suspect:
    """A worker that has been silent for too long.

    Attributes:
        worker, incarnation: which.
        silent_s: seconds since its last beat (or since it was expected) that the manager was awake.
        reason: for people.
        all_are_silent: True if no worker at all (of two or more) is heard: the manager's own link may be cut.
    """

    worker: str
    incarnation: str
    silent_s: float
    reason: str
    all_are_silent: bool


@dataclass(frozen=True, kw_only=True)
class Refused:
    """A beat that counts for nothing; the worker is told the reason and must ask for a new incarnation."""

    worker: str
    incarnation: str
    reason: str


@dataclass
class _Life:
    """The newest incarnation of a worker. ``heard_s`` is awake time."""

    incarnation: str
    heard_s: float
    limit_s: float
    has_beaten: bool
    fenced_reason: str = ""


class Heartbeats:
    """Liveness of all workers of a job.

    Args:
        limit_s: a worker silent for this long is suspect. Workers should beat at least every quarter of it.
        most_gap_s: the most that counts between two calls, by default a quarter of ``limit_s``. Call
            ``suspects`` more often than that, or finding takes longer.
    """

    def __init__(self, limit_s: float, *, most_gap_s: float | None = None) -> None:
        self.limit_s = limit_s
        self._most_gap_s = limit_s / 4 if most_gap_s is None else most_gap_s
        assert limit_s > 0, limit_s
        assert self._most_gap_s > 0, most_gap_s
        self._lives: dict[str, _Life] = {}
        self._awake_s = 0.0
        self._last_now_s: float | None = None

    def expect(self, worker: str, incarnation: str, now_s: float, *, limit_s: float | None = None) -> None:
        """A new incarnation was started; its first beat is due within ``limit_s`` (by default the usual limit).

        Any other incarnation of the worker is refused from here on.
        """
        self._advance(now_s)
        known = self._lives.get(worker)
        assert known is None or incarnation != known.incarnation, (worker, incarnation)
        self._lives[worker] = _Life(
            incarnation=incarnation,
            heard_s=self._awake_s,
            limit_s=self.limit_s if limit_s is None else limit_s,
            has_beaten=False,
        )

    def beat(self, worker: str, incarnation: str, now_s: float) -> Refused | None:
        """A beat arrived; None if it counts."""
        self._advance(now_s)
        known = self._lives.get(worker)
        if known is None:
            return Refused(worker=worker, incarnation=incarnation, reason="not expected: ask to join first")
        if incarnation != known.incarnation:
            reason = f"incarnation {known.incarnation} is expected in its place"
            return Refused(worker=worker, incarnation=incarnation, reason=reason)
        if known.fenced_reason:
            return Refused(worker=worker, incarnation=incarnation, reason=known.fenced_reason)
        known.heard_s, known.limit_s, known.has_beaten = self._awake_s, self.limit_s, True
        return None

    def suspects(self, now_s: float) -> tuple[Suspect, ...]:
        """Workers silent for their limit, longest first. They stay suspect until they beat or are fenced."""
        self._advance(now_s)
        live = {worker: life for worker, life in self._lives.items() if not life.fenced_reason}
        silent = {
            worker: self._awake_s - life.heard_s
            for worker, life in live.items()
            if self._awake_s - life.heard_s >= life.limit_s
        }
        all_are_silent = len(live) > 1 and len(silent) == len(live)
        return tuple(
            Suspect(
                worker=worker,
                incarnation=live[worker].incarnation,
                silent_s=silent_s,
                reason=_reason(worker, live[worker], silent_s, all_are_silent),
                all_are_silent=all_are_silent,
            )
            for worker, silent_s in sorted(silent.items(), key=lambda item: (-item[1], item[0]))
        )

    def fence(self, worker: str, incarnation: str, reason: str) -> None:
        """This incarnation is out, or left: its beats are refused from now on. Another one is not touched."""
        assert reason, "the worker is told the reason"
        known = self._lives.get(worker)
        if known is not None and known.incarnation == incarnation:
            known.fenced_reason = known.fenced_reason or reason

    def live(self) -> dict[str, str]:
        """Incarnation of every worker that is expected or beats and is not fenced; suspects among them."""
        return {worker: life.incarnation for worker, life in self._lives.items() if not life.fenced_reason}

    def _advance(self, now_s: float) -> None:
        if self._last_now_s is not None:
            self._awake_s += min(max(0.0, now_s - self._last_now_s), self._most_gap_s)
        self._last_now_s = now_s


def _reason(worker: str, life: _Life, silent_s: float, all_are_silent: bool) -> str:
    what = "no heartbeat" if life.has_beaten else "no first heartbeat"
    text = f"{worker} (incarnation {life.incarnation}): {what} for {silent_s:.1f} s of {life.limit_s:g} s"
    if all_are_silent:
        text += "; no other worker is heard either, so the manager's own link may be cut"
    return text
