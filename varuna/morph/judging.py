"""What the manager remembers of how long workers compute, and when it changes its mind about their speed."""

from __future__ import annotations

from varuna.morph.messages import StepDone
from varuna.morph.record import JobRecord, WorkerRecord, WorkerStatus
from varuna.morph.slowness import REST_BELOW, REST_S, WINDOW, Pace, paces, rest_s

_SPEED_CHANGE = 0.1
"""A speed that differs less from what is known is nothing new."""


def note_busy(job: JobRecord, worker: WorkerRecord, message: StepDone) -> None:
    """Remember how long a worker computed in a step of the newest generation."""
    if message.generation == job.generation.number and message.busy_s > 0:
        known = job.generation.busy_s.get(worker.incarnation, [])
        job.generation.busy_s[worker.incarnation] = [*known, message.busy_s][-WINDOW:]


def judge(job: JobRecord, now_s: float, first_rest_s: float = REST_S) -> list[str]:
    """Set the speeds of members by their last steps; what is new about it, for people.

    Args:
        job: changed in place.
        now_s: seconds of the manager's clock.
        first_rest_s: how long a worker that is too slow rests the first time.
    """
    generation = job.generation
    assert generation.plan is not None
    ranks = {name: rank for rank, name in enumerate(generation.members)}
    busy_s = {ranks[name]: steps for name, steps in generation.busy_s.items() if name in ranks}
    news = []
    for pace in paces(generation.plan, busy_s, _predicted_s(job)):
        worker = job.workers[generation.members[pace.rank]]
        if worker.status is WorkerStatus.MEMBER:
            news += _judge_one(worker, pace, now_s, first_rest_s)
    return news


def _judge_one(worker: WorkerRecord, pace: Pace, now_s: float, first_rest_s: float) -> list[str]:
    speed = round(pace.speed, 2) if pace.is_chronic else 1.0
    if abs(speed - worker.speed) < _SPEED_CHANGE:
        return []
    worker.speed = speed
    times = f"{pace.busy_s:.3g} s for a micro-batch, its peers {pace.peers_s:.3g} s"
    if speed == 1.0:
        worker.num_rests = 0
        return [f"{worker.incarnation} is as fast as its peers again: {times}"]
    if speed < REST_BELOW and worker.rests_until_s is None:
        worker.rests_until_s = now_s + rest_s(worker.num_rests, first_rest_s)
        worker.num_rests += 1
    return [f"{worker.incarnation} is slow: {times}"]


def _predicted_s(job: JobRecord) -> dict[int, float]:
    """Per rank, predicted seconds for a micro-batch; empty without a prediction."""
    generation = job.generation
    if generation.plan is None or not generation.micro_batch_s:
        return {}
    return {
        stage.worker_index: seconds
        for pipeline, row in zip(generation.plan.pipelines, generation.micro_batch_s, strict=True)
        for stage, seconds in zip(pipeline.stages, row, strict=True)
    }
