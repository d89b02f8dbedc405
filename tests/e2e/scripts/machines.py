"""``morphing.py`` for a job of many machines: ``machines.py NUM_STEPS``; files have workers' whole names.

No step begins whose index is not below the number in the file ``limit``. Each worker writes its steps to
``steps-INCARNATION.jsonl``; worker 0 writes the final weights to ``state.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import sys
import time
from pathlib import Path

from tests.cases import jobs
from tests.e2e.morphing import TRAINING

POLL_S = 0.005
NUM_STEPS = int(sys.argv[1])
WORKER = os.environ["VARUNA_INCARNATION"]


def wait_for(condition) -> None:
    while not condition():
        time.sleep(POLL_S)


def allowed(step_index: int) -> bool:
    return step_index < int(Path("limit").read_text())


Path(f"began-{WORKER}").write_text(str(os.getpid()))
wait_for(lambda: not Path("hold").exists())
job, _ = dataclasses.replace(TRAINING, num_stages=int(os.environ["VARUNA_STAGES"])).job()
with Path(f"steps-{WORKER}.jsonl").open("w", buffering=1) as file:
    wait_for(lambda: allowed(job.step_index))
    for step in job.train(NUM_STEPS):
        file.write(json.dumps(dataclasses.asdict(step)) + "\n")
        if job.step_index < NUM_STEPS:
            wait_for(lambda: allowed(job.step_index))
state = job.full_state_dict()
if job.rank == 0:
    Path("state.part").write_text(json.dumps(jobs.encode(state)))
    Path("state.part").rename("state.json")
job.close()
