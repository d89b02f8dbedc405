"""What happened, as frozen values, and the bus that carries them. Whoever works publishes; ``observe`` listens.

A listener that raises is a bug of the listener: it is reported once through ``warnings`` and removed, and
the run goes on.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import dataclass

from varuna.spec import Plan, SectionSpec, Step


@dataclass(frozen=True, kw_only=True)
class Event:
    """Base of all events."""


@dataclass(frozen=True, kw_only=True)
class CaptureFinished(Event):
    """The model became sections; ``from_cache`` if an earlier capture was reused."""

    sections: tuple[SectionSpec, ...]
    duration_s: float
    from_cache: bool


@dataclass(frozen=True, kw_only=True)
class ProfileMeasured(Event):
    """What the sections cost is known: measured now in ``duration_s``, or ``from_cache``.

    ``num_refinements`` counts the steps of earlier runs that went into it.
    """

    num_sections: int
    duration_s: float
    from_cache: bool
    num_refinements: int = 0


@dataclass(frozen=True, kw_only=True)
class CheckFinished(Event):
    """The start-up check ended; ``skipped_reason`` is empty if it ran and held."""

    max_difference: float
    skipped_reason: str = ""


@dataclass(frozen=True, kw_only=True)
class PlanChosen(Event):
    """A plan takes effect; ``reason`` says why it was chosen."""

    generation: int
    plan: Plan
    reason: str


@dataclass(frozen=True, kw_only=True)
class TrainStarted(Event):
    """``job.train`` was called."""

    first_step: int
    num_steps: int


@dataclass(frozen=True, kw_only=True)
class StepFinished(Event):
    """One optimizer update is done."""

    step: Step


@dataclass(frozen=True, kw_only=True)
class Evaluated(Event):
    """``job.evaluate`` returned."""

    loss: float
    num_samples: int
    duration_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointSaved(Event):
    """A checkpoint is complete and durable.

    Attributes:
        step: steps done.
        url: where it is.
        size_bytes: of all its files; 0 if that and the times are not known, since who knew them is gone.
        pause_s: how long training stood still for the copy.
        write_s: how long writing took behind it.
    """

    step: int
    url: str
    size_bytes: int
    pause_s: float
    write_s: float


@dataclass(frozen=True, kw_only=True)
class CheckpointFailed(Event):
    """A save did not become a checkpoint; training goes on, and older ones stay."""

    step: int
    url: str
    reason: str


@dataclass(frozen=True, kw_only=True)
class Resumed(Event):
    """The job goes on from a checkpoint: at its start, or because nobody had its newest state any more."""

    step: int
    url: str


@dataclass(frozen=True, kw_only=True)
class TrainFinished(Event):
    """``job.train`` ended, by its last step or by an exception (``error`` then says which)."""

    num_steps: int
    duration_s: float
    error: str = ""


@dataclass(frozen=True, kw_only=True)
class Notice(Event):
    """Something a person should read once, in one line."""

    text: str


Listener = Callable[[Event], None]


class EventBus:
    """Hands every published event to every listener, in order, in the publisher's thread."""

    def __init__(self) -> None:
        self._listeners: list[Listener] = []

    def subscribe(self, listener: Listener) -> None:
        """Call ``listener(event)`` for every later event."""
        self._listeners.append(listener)

    def publish(self, event: Event) -> None:
        """Hand one event to all listeners."""
        for listener in tuple(self._listeners):
            try:
                listener(event)
            except Exception as error:  # a listener never stops the run
                self._listeners.remove(listener)
                warnings.warn(f"Event listener {listener!r} failed and was removed: {error!r}", stacklevel=2)
