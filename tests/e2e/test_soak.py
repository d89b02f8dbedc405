"""A short soak; ``make soak`` is the long one."""

from __future__ import annotations

import contextlib
from pathlib import Path

import psutil

from tests.e2e.jobs import Ended, Job, Warm
from varuna.testing.faults import FaultScript
from varuna.testing.soak import STEPS_PER_FAULT, findings, run_arguments, run_environ
from varuna.testing.soak_driver import Soak, Soaked

NUM_FAULTS = 15
NUM_STEPS = STEPS_PER_FAULT * NUM_FAULTS
SEED = 2


def test_many_faults_change_nothing(jobs: Warm, tmp_path: Path) -> None:
    undisturbed = tmp_path / "undisturbed"
    undisturbed.mkdir()
    (undisturbed / "limit").write_text(str(NUM_STEPS))
    script = FaultScript(tmp_path / "faults")
    environ = run_environ(tmp_path, script)
    alone = {name: value for name, value in environ.items() if name not in script.environ()}
    ended = jobs.command(undisturbed, run_arguments(undisturbed, NUM_STEPS, 1), alone).wait()
    assert ended.codes == [0], ended.stderr
    soak = Soak(
        tmp_path,
        script,
        tmp_path / "cache",
        num_steps=NUM_STEPS,
        seed=SEED,
        num_faults=NUM_FAULTS,
        say=print,
    )
    soaked, ended = soak_of(soak, jobs.command(tmp_path, run_arguments(tmp_path, NUM_STEPS), environ))
    print(soaked.uses.table())
    assert ended.codes == [0], ended.stderr
    assert ended.left == []
    assert soaked.num_faults >= NUM_FAULTS
    assert soaked.num_generations > NUM_FAULTS / 2
    assert findings(tmp_path, undisturbed, NUM_STEPS, soaked) == []


def soak_of(soak: Soak, job: Job) -> tuple[Soaked, Ended]:
    """What came of it, and how the job ended; nothing of it is left whatever happens."""
    try:
        return soak.run(lambda: psutil.pid_exists(job.pid)), job.wait()
    except BaseException:
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in (psutil.Process(job.pid), *psutil.Process(job.pid).children(recursive=True)):
                process.kill()
        print(job.wait().stderr)
        raise
