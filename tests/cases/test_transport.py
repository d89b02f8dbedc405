"""S24, S25: gloo is enough, and no schedule waits in a circle."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varuna
from tests.cases import jobs, models, plain
from tests.cases.jobs import Training
from varuna.plan import SCHEDULES

# --- S24 ------------------------------------------------------------------------------------

_LARGE = 1 << 18  # numbers per sample: 2 MB in fp64, more than any socket buffer takes


class Wide(nn.Module):
    """Large activations one way, as large gradients the other way, and a large tied weight."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(_LARGE))
        self.second = nn.Parameter(torch.randn(_LARGE))
        self.cut = varuna.CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.cut(x[:, :1] * self.first)
        return F.mse_loss((h * self.second * self.first).mean(-1), y)


def backends(training: Training) -> dict[str, Any]:
    """Trains; gives the kinds of the process groups as well."""
    job, _ = training.job()
    with job:
        losses = [step.loss for step in job.train(training.num_steps)]
        groups = job._member.generation.groups._groups.values()
        kinds = {type(group.process_group).__name__ for group in groups if group.size > 1}
        return {"losses": losses, "kinds": sorted(kinds)}


@pytest.mark.parametrize("schedule", ["1f1b", "varuna"])
def test_s24_gloo_alone_and_no_deadlock_with_large_messages(schedule: str) -> None:
    """4 MB per message, in both directions at once, while 2 MB gradients are reduced over gloo."""
    training = Training(
        model=Wide, dataset=models.points(), num_stages=2, batch_size=12, num_steps=2, schedule=schedule
    )
    results = jobs.run_workers(4, backends, training)
    theirs = plain.train(training, plain.mean_over_samples)
    for result in results:
        assert result["kinds"] == ["ProcessGroupGloo"]
        plain.assert_equal(result["losses"], theirs.losses)


# --- S25 ------------------------------------------------------------------------------------

NEST = Training(model=models.Nest, dataset=models.points(), num_stages=4, num_steps=2)
LAYOUTS = ((15, False), (6, True), (1, False), (1, (True, False, True, True)))
"""Micro-batch size (N = 1, 3 and 15 for four stages) and recompute."""


def every_schedule(training: Training) -> list[dict[str, Any]]:
    """One job after another in the same processes; the schedules differ, the numbers must not."""
    results = []
    for schedule in SCHEDULES:
        for size, recompute in LAYOUTS:
            jobs.another_job(f"{schedule} {size} {recompute}")
            one = replace(training, schedule=schedule, micro_batch_size=size, recompute=recompute)
            results.append(jobs.train_here(one))
    return results


def test_s25_no_schedule_waits_in_a_circle() -> None:
    """Four real stages: every schedule, fewer and more micro-batches than stages, some with recompute."""
    results = jobs.run_workers(4, every_schedule, NEST)
    theirs = plain.train(NEST, plain.mean_over_samples)
    assert len(results[0]) == len(SCHEDULES) * len(LAYOUTS)
    for same_job in zip(*results, strict=True):
        ours = jobs.collect(same_job)
        assert plain.difference(ours.state, theirs.state) < 1e-11
        plain.assert_equal(ours.loss, theirs.losses)
