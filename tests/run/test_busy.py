"""What a worker tells of its work in a step: how long it computed, which samples it read."""

from __future__ import annotations

import time

import torch

import varuna
from tests.cases import models
from tests.cases.jobs import Training, run_workers
from tests.cases.models import text
from varuna.generations import StepWork
from varuna.order import digest_of
from varuna.plan import stage_schedule
from varuna.run.busy import BusyTime
from varuna.run.engine import Message, StepContext, run_stage

WORK_S = 0.004


class Spinning:
    """A stage that computes for a known time."""

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        self.spin()
        return None

    def recompute(self, micro_batch_index: int) -> None:
        self.spin()

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool
    ) -> Message | None:
        self.spin()
        return None

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        self.spin()

    @staticmethod
    def spin() -> None:
        end_s = time.monotonic() + WORK_S
        while time.monotonic() < end_s:
            pass


def test_tasks_count_and_nothing_else_does() -> None:
    schedule = stage_schedule("varuna", num_stages=1, stage_index=0, num_micro_batches=3, recompute=[False])
    context = StepContext(
        generation=0, step_index=0, operation="train", first_micro_batch=0, rank=0, stage_index=0
    )
    busy = BusyTime(torch.device("cpu"))
    for _ in range(2):
        busy.reset()
        started_s = time.monotonic()
        run_stage(Spinning(), schedule, None, context=context, busy=busy)
        assert 6 * WORK_S <= busy.seconds() <= time.monotonic() - started_s
    busy.reset()
    assert busy.seconds() == 0.0


TRAINING = Training(
    model=lambda: models.Tagger(states_weight=True, tied=True), dataset=text(), batch_size=7, num_stages=2
)


def work() -> list[tuple[float, list[object] | None]]:
    job, _ = TRAINING.job()
    found = []
    for _ in job.train(3):
        assert job._member is not None
        done: StepWork = job._member.generation.work()
        share = done.samples
        found.append((done.busy_s, None if share is None else [share.first, share.end, share.digest]))
    return found


def test_the_first_stage_of_each_pipeline_tells_its_samples() -> None:
    """Batches of 7 in micro-batches of 2, two pipelines of two stages."""
    workers = run_workers(4, work)
    ids = [varuna.sample_ids(step, len(TRAINING.dataset), 7, 3) for step in range(3)]
    shares = [[share for _, share in one] for one in workers]
    assert shares[1] == shares[3] == [None] * 3
    (first, end, _), (then, last, _) = shares[0][0], shares[2][0]
    assert (first, end, last) == (0, then, 7)
    for step in range(3):
        assert shares[0][step] == [0, end, digest_of(ids[step][:end])]
        assert shares[2][step] == [end, 7, digest_of(ids[step][end:])]
    assert all(busy_s > 0 for one in workers for busy_s, _ in one)
