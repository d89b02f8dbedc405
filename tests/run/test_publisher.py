"""Who tells people: worker 0; one that becomes worker 0 in the middle of a training begins with its start."""

from __future__ import annotations

from tests.observe.test_progress import step
from varuna.events import Event, Notice, StepFinished, TrainFinished, TrainStarted
from varuna.run.publisher import Publisher

STARTED = TrainStarted(first_step=0, num_steps=5)
FINISHED = TrainFinished(num_steps=5, duration_s=1.0, error="")


def test_whoever_becomes_worker_0_tells_first_what_is_under_way() -> None:
    told: list[Event] = []
    rank = 1
    publisher = Publisher(lambda: told.append, lambda: rank == 0)
    publisher.publish(STARTED)
    assert told == []
    rank = 0
    publisher.publish(Notice(text="a"))
    publisher.publish(FINISHED)
    assert told == [STARTED, Notice(text="a"), FINISHED]


def test_whoever_becomes_worker_0_late_tells_what_is_left() -> None:
    told: list[Event] = []
    rank = 1
    publisher = Publisher(lambda: told.append, lambda: rank == 0)
    publisher.publish(STARTED)
    publisher.publish(StepFinished(step=step(0)))
    publisher.publish(StepFinished(step=step(1)))
    rank = 0
    publisher.publish(StepFinished(step=step(2)))
    assert told == [TrainStarted(first_step=2, num_steps=3), StepFinished(step=step(2))]


def test_a_training_that_is_over_is_not_told_afterwards() -> None:
    told: list[Event] = []
    rank = 1
    publisher = Publisher(lambda: told.append, lambda: rank == 0)
    publisher.publish(STARTED)
    publisher.publish(FINISHED)
    rank = 0
    publisher.publish(Notice(text="a"))
    assert told == [Notice(text="a")]
