"""Where the time of a replayed job went, from what its manager told. Pure: events in, figures out.

    ideal samples = steps that counted
                  + standing still (re-planning, waiting for workers)
                  + steps lost and done again
                  + workers that were there and not in use yet, or gave up their place before they had to go
                  + steps that took longer than the usual one
                  + the step under way at the end

The ideal always runs at the usual pace for as many workers as there are: the batch over the median undisturbed
step with so many members, as measured in the same run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime
from statistics import median

from varuna.errors import RunError
from varuna.morph.views import LoggedEvent
from varuna.plan.fleet_result import Activity

_STOPPED = (Activity.MORPH, Activity.WAITING)


@dataclass(frozen=True, kw_only=True)
class Segment:
    """What the job did for a while, with how many members; seconds since the replay began."""

    start_s: float
    end_s: float
    activity: Activity
    members: int
    step_index: int = -1


@dataclass(frozen=True, kw_only=True)
class ReplayResult:
    """What a replay came to.

    Attributes:
        trace: its name.
        duration_s: how long it was, in the job's own seconds.
        counts: workers that there should be, from when on.
        batch_size: samples of a step.
        num_steps: that counted.
        ideal_samples: of a job for which changes cost nothing.
        step_s: median undisturbed step by number of members.
        wall_s: seconds of the job by activity; their sum is ``duration_s``.
        lost: samples short of the ideal by cause; their sum is ``ideal_samples`` less ``samples``.
        morphs: per generation after the first, the figures of its ``running`` event (``morph/times.py``).
        starts_s: seconds from asking for a newcomer until it was ready, the first asked for taken as the first
            that is.
        segments: what the job did, in order.
    """

    trace: str
    duration_s: float
    counts: tuple[tuple[float, int], ...]
    batch_size: int
    num_steps: int
    ideal_samples: float
    step_s: Mapping[int, float]
    wall_s: Mapping[Activity, float]
    lost: Mapping[str, float]
    morphs: tuple[Mapping[str, float], ...]
    starts_s: tuple[float, ...]
    segments: tuple[Segment, ...]

    @property
    def samples(self) -> int:
        """Of steps that counted."""
        return self.num_steps * self.batch_size

    @property
    def goodput(self) -> float:
        """Samples over those of the ideal."""
        return self.samples / self.ideal_samples


def seconds_of(event: LoggedEvent) -> float:
    """When it happened, in Unix time."""
    return datetime.fromisoformat(event.at).timestamp()


def account(
    name: str,
    events: Sequence[LoggedEvent],
    counts: tuple[tuple[float, int], ...],
    *,
    duration_s: float,
    batch_size: int,
) -> ReplayResult:
    """What became of a job.

    Args:
        name: of the trace.
        events: of the job from the ``running`` event of a generation on, with which the replay begins.
        counts: workers that there should be, from which second of the replay on.
        duration_s: of the replay.
        batch_size: samples of a step.

    Raises:
        RunError: no step was undisturbed, so that there is no usual pace.
    """
    books = _Books(seconds_of(events[0]))
    for event in events:
        if (at_s := seconds_of(event) - books.began_s) <= duration_s:
            books.take(event, at_s)
    segments = books.finish(duration_s)
    step_s = {members: median(durations) for members, durations in sorted(books.durations_s.items())}
    if not step_s:
        raise RunError(f"No two steps in a row were undisturbed in {duration_s:.1f} s: there is no usual pace.")
    ideal = _Ideal(counts, step_s, batch_size, duration_s)
    counted = [segment for segment in segments if segment.activity is Activity.TRAINING]
    return ReplayResult(
        trace=name,
        duration_s=duration_s,
        counts=counts,
        batch_size=batch_size,
        num_steps=len(counted),
        ideal_samples=ideal.samples(0.0, duration_s),
        step_s=step_s,
        wall_s={
            activity: sum(one.end_s - one.start_s for one in segments if one.activity is activity)
            for activity in Activity
        },
        lost=_lost(segments, ideal, batch_size),
        morphs=tuple(books.morphs),
        starts_s=tuple(books.starts_s),
        segments=segments,
    )


@dataclass
class _Books:
    """Reads events in their order; ``cursor_s`` is up to where time is accounted for."""

    began_s: float
    cursor_s: float = 0.0
    activity: Activity = Activity.TRAINING
    members: int = 0
    is_clean: bool = False  # the last thing that happened was a step of this generation
    segments: list[Segment] = field(default_factory=list)
    durations_s: dict[int, list[float]] = field(default_factory=dict)
    morphs: list[Mapping[str, float]] = field(default_factory=list)
    asked_s: list[float] = field(default_factory=list)  # when newcomers were asked for that are not ready
    starts_s: list[float] = field(default_factory=list)

    def take(self, event: LoggedEvent, at_s: float) -> None:
        """One event."""
        if event.kind == "running":
            self._until(at_s, self.activity if self.activity in _STOPPED else Activity.MORPH)
            self.activity, self.is_clean = Activity.TRAINING, False
            self.members = int(event.figures["members"])
            if "stood_s" in event.figures:
                self.morphs.append(event.figures)
        elif event.kind == "step" and event.step_index is not None:
            self._step(event.step_index, at_s)
        elif event.kind == "ending" and self.activity is Activity.TRAINING:
            self._until(at_s, Activity.REDONE)
            self.activity = Activity.MORPH
        elif event.kind == "forming":
            self._until(at_s, self.activity if self.activity in _STOPPED else Activity.MORPH)
            self.activity = Activity.MORPH
        elif event.kind == "waiting":
            self._until(at_s, Activity.MORPH)
            self.activity = Activity.WAITING
        elif event.kind == "adding":
            self.asked_s += [at_s] * int(event.figures["count"])
        elif event.kind == "ready" and self.asked_s:
            self.starts_s.append(at_s - self.asked_s.pop(0))
        elif event.kind == "undone":
            self._undo(int(event.figures["first_step"]))

    def finish(self, end_s: float) -> tuple[Segment, ...]:
        """The end: what is under way has come to nothing."""
        self._until(end_s, Activity.UNFINISHED if self.activity is Activity.TRAINING else self.activity)
        return tuple(self.segments)

    def _step(self, step_index: int, at_s: float) -> None:
        if self.activity is Activity.TRAINING:
            if self.is_clean:
                self.durations_s.setdefault(self.members, []).append(at_s - self.cursor_s)
            self._until(at_s, Activity.TRAINING, step_index)
            self.is_clean = True
        else:  # it turns out that its commit had returned before the generation ended
            at = max(at for at, one in enumerate(self.segments) if one.activity is Activity.REDONE)
            self.segments[at] = replace(self.segments[at], activity=Activity.TRAINING, step_index=step_index)

    def _undo(self, first_step: int) -> None:
        self.segments = [
            replace(one, activity=Activity.REDONE) if one.step_index >= first_step else one
            for one in self.segments
        ]

    def _until(self, at_s: float, activity: Activity, step_index: int = -1) -> None:
        """Everything up to now went into this."""
        self.segments.append(
            Segment(
                start_s=self.cursor_s,
                end_s=at_s,
                activity=activity,
                members=self.members,
                step_index=step_index,
            )
        )
        self.cursor_s = at_s


@dataclass(frozen=True)
class _Ideal:
    """The job for which changes cost nothing."""

    counts: tuple[tuple[float, int], ...]
    step_s: Mapping[int, float]
    batch_size: int
    duration_s: float

    def rate(self, num_workers: int) -> float:
        """Samples a second; for numbers that were never undisturbed, from the nearest one, in proportion."""
        if num_workers == 0:
            return 0.0
        nearest = min(self.step_s, key=lambda known: (abs(known - num_workers), known))
        return self.batch_size / self.step_s[nearest] * (num_workers / nearest)

    def samples(self, start_s: float, end_s: float) -> float:
        """Of the ideal between two moments."""
        ends = [time_s for time_s, _ in self.counts[1:]] + [self.duration_s]
        return sum(
            self.rate(count) * max(0.0, min(end_s, until_s) - max(start_s, from_s))
            for (from_s, count), until_s in zip(self.counts, ends, strict=True)
        )


def _lost(segments: Sequence[Segment], ideal: _Ideal, batch_size: int) -> dict[str, float]:
    """Samples by cause; see the module's text."""
    lost = dict.fromkeys(("not in use", "slower steps", "morph", "redone", "waiting", "unfinished"), 0.0)
    for segment in segments:
        possible = ideal.samples(segment.start_s, segment.end_s)
        if segment.activity is Activity.TRAINING:
            usual = ideal.rate(segment.members) * (segment.end_s - segment.start_s)
            lost["not in use"] += possible - usual
            lost["slower steps"] += usual - batch_size
        else:
            lost[segment.activity.value] += possible
    return lost
