"""Who tells people what happens: worker 0, whoever that is now."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from varuna.events import Event, EventBus, Listener, StepFinished, TrainFinished, TrainStarted


class Publisher:
    """Hands events to the user's listener, or shows progress, on worker 0.

    Args:
        listener: makes what is told; asked once, when this worker first is worker 0. None: nobody is told.
        is_first: whether this worker is worker 0 now.
    """

    def __init__(self, listener: Callable[[], Listener] | None, is_first: Callable[[], bool]) -> None:
        self._bus = EventBus()
        self._listener = listener
        self._is_first = is_first
        self._untold: TrainStarted | None = None

    def publish(self, event: Event) -> None:
        """Tell one event, if this worker is the one that tells; first the start of the training under way."""
        if isinstance(event, TrainStarted):
            self._untold = event
        if not self._is_first():
            self._untold = _left_of(self._untold, event)
            return
        begun, self._untold = self._untold, None
        if self._listener is not None:
            self._bus.subscribe(self._listener())
            self._listener = None
        if begun is not None and begun is not event:
            self._bus.publish(begun)
        self._bus.publish(event)


def _left_of(training: TrainStarted | None, event: Event) -> TrainStarted | None:
    """What is still to come of a training after an event that nobody was told of here."""
    if training is None or isinstance(event, TrainFinished):
        return None
    if not isinstance(event, StepFinished):
        return training
    first_step = event.step.index + 1
    return replace(
        training, first_step=first_step, num_steps=training.first_step + training.num_steps - first_step
    )
