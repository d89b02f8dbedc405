"""Trains ``tests.e2e.morphing.TRAINING`` and keeps what each worker sees: ``morphing.py NUM_STEPS``.

No step begins whose index is not below the number in the file ``limit``. Each worker writes its steps to
``steps-WORKER.jsonl``, and what it has added up itself to ``seen-WORKER.json``; worker 0 writes the
final weights to ``state.json``. A second argument ``tells`` has progress shown; ``switches`` freezes a
parameter and ends dropout after the first step.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from tests.cases import jobs
from tests.e2e.morphing import TRAINING, switch_off

POLL_S = 0.005
NUM_STEPS = int(sys.argv[1])
WORKER = int(os.environ["VARUNA_INCARNATION"].rsplit(".", 2)[1])


class Seen:
    """What the loop's body adds up: registered, so it goes to newcomers and into checkpoints."""

    def __init__(self) -> None:
        self.num_steps, self.loss_sum = 0, 0.0

    def add(self, step) -> None:
        self.num_steps, self.loss_sum = self.num_steps + 1, self.loss_sum + step.loss

    def state_dict(self):
        return vars(self)

    def load_state_dict(self, state) -> None:
        vars(self).update(state)


def wait_for(condition) -> None:
    while not condition():
        time.sleep(POLL_S)


def allowed(step_index: int) -> bool:
    return step_index < int(Path("limit").read_text())


options = {**TRAINING.options, "progress": "tells" in sys.argv[2:]}
job, model = dataclasses.replace(TRAINING, num_stages=int(os.environ["VARUNA_STAGES"]), options=options).job()
seen = Seen()
job.register("seen", seen)
with Path(f"steps-{WORKER}.jsonl").open("w", buffering=1) as file:
    wait_for(lambda: allowed(job.step_index))
    for step in job.train(NUM_STEPS):
        file.write(json.dumps(dataclasses.asdict(step)) + "\n")
        seen.add(step)
        if step.index == 0 and "switches" in sys.argv:
            switch_off(model)
        if job.rank == 0:
            print(f"worker {WORKER} tells step {step.index}", flush=True)
        if job.step_index < NUM_STEPS:
            wait_for(lambda: allowed(job.step_index))
Path(f"seen-{WORKER}.json").write_text(json.dumps(seen.state_dict()))
state = job.full_state_dict()
if job.rank == 0:
    Path("state.part").write_text(json.dumps(jobs.encode(state)))
    Path("state.part").rename("state.json")
job.close()
