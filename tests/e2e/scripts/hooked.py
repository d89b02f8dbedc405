"""``morphing.py`` on workers to which more can happen: ``hooked.py NUM_STEPS [UNHEARD]``.

Before each micro-batch's forward a worker sleeps for the seconds in the file ``pace-WORKER``, else in ``pace``,
if there is one: what it computes takes so much longer. UNHEARD, ``STEP:WORKER,WORKER``: to these workers it is
as if the commit of that step did not return, once the file ``go`` is there.
"""

from __future__ import annotations

import os
import runpy
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path

from varuna import request
from varuna.errors import PeerLost

WORKER = os.environ["VARUNA_INCARNATION"].rsplit(".", 2)[1]
STEP, _, WORKERS = sys.argv.pop().partition(":") if len(sys.argv) > 2 else ("", "", "")
faults_from_env = request.faults_from_env


def hooks(environ: Mapping[str, str], step_index: Callable[[], int]) -> Callable[[str], None]:
    scripted = faults_from_env(environ, step_index)

    def at(point: str) -> None:
        scripted(point)
        if point == "forward":
            for path in (Path(f"pace-{WORKER}"), Path("pace")):
                if path.exists():
                    time.sleep(float(path.read_text()))
                    break
        elif point == "committed" and WORKER in WORKERS.split(",") and step_index() == int(STEP):
            while not Path("go").exists():
                time.sleep(0.005)
            raise PeerLost("it was not heard how the commit has ended")

    return at


request.faults_from_env = hooks
runpy.run_path(str(Path(__file__).with_name("morphing.py")), run_name="__main__")
