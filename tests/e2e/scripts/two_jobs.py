"""Two jobs in one script: ``two_jobs.py``."""

from __future__ import annotations

import dataclasses

from tests.e2e.morphing import TRAINING

for number in range(2):
    job, _ = dataclasses.replace(TRAINING, options={**TRAINING.options, "progress": True}).job()
    losses = [step.loss for step in job.train(3)]
    if job.rank == 0:
        print(f"job {number}: {losses}", flush=True)
