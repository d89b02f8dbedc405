"""Trains ``tests.e2e.morphing.TRAINING`` and keeps what each worker sees; faults come when they are asked for.

``morphing.py NUM_STEPS [FAULT ...]``, each ``WHAT:WORKER:POINT:STEP:COUNT``: WHAT happens on worker WORKER
(its number, as in its log's name) when it comes to POINT for the COUNT-th time in step STEP. WHAT: kill, stop
(SIGSTOP to itself), wait (until the file ``go`` exists), raise. The file ``fired-WORKER`` is left before.

No step begins whose index is not below the number in the file ``limit``. Each worker writes its steps to
``steps-WORKER.jsonl``; worker 0 writes the final weights to ``state.json``.
"""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import sys
import time
from pathlib import Path

from tests.cases import jobs
from tests.e2e.morphing import TRAINING, Fault

POLL_S = 0.005
NUM_STEPS, FAULTS = int(sys.argv[1]), [Fault.parse(text) for text in sys.argv[2:]]
WORKER = int(os.environ["VARUNA_INCARNATION"].rsplit(".", 2)[1])


class Points:
    """Where this worker is, and what goes wrong there."""

    def __init__(self, faults: list[Fault]) -> None:
        self.faults = [fault for fault in faults if fault.worker == WORKER]
        self.step_index = -1
        self.seen: dict[str, int] = {}

    def at(self, point: str) -> None:
        if point == "step":
            self.step_index, self.seen = job.step_index, {}
        self.seen[point] = self.seen.get(point, 0) + 1
        for fault in self.faults:
            if (fault.point, fault.step, fault.count) == (point, self.step_index, self.seen[point]):
                self.faults.remove(fault)
                self.happen(fault)
                return

    @staticmethod
    def happen(fault: Fault) -> None:
        Path(f"fired-{WORKER}.part").write_text(str(fault))
        Path(f"fired-{WORKER}.part").rename(f"fired-{WORKER}")
        if fault.what == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        elif fault.what == "stop":
            os.kill(os.getpid(), signal.SIGSTOP)
        elif fault.what == "wait":
            wait_for(Path("go").exists)
        else:
            raise KeyError(f"injected on worker {WORKER}")


def wait_for(condition) -> None:
    while not condition():
        time.sleep(POLL_S)


def allowed(step_index: int) -> bool:
    return step_index < int(Path("limit").read_text())


points = Points(FAULTS)
for fault in points.faults:
    if fault.point == "start":
        points.happen(fault)
job, _ = dataclasses.replace(TRAINING, num_stages=int(os.environ["VARUNA_STAGES"])).job()
request = job._request
job._request = dataclasses.replace(request, job=dataclasses.replace(request.job, at=points.at))
with Path(f"steps-{WORKER}.jsonl").open("w", buffering=1) as file:
    wait_for(lambda: allowed(job.step_index))
    for step in job.train(NUM_STEPS):
        file.write(json.dumps(dataclasses.asdict(step)) + "\n")
        if job.rank == 0:
            print(f"worker {WORKER} tells step {step.index}", flush=True)
        if job.step_index < NUM_STEPS:
            wait_for(lambda: allowed(job.step_index))
state = job.full_state_dict()
if job.rank == 0:
    Path("state.part").write_text(json.dumps(jobs.encode(state)))
    Path("state.part").rename("state.json")
job.close()
