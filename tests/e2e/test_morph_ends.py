"""How jobs end in which workers come and go: what happens in the last step is mended, too."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.e2e.conftest import Start
from tests.e2e.morphing import NUM_STEPS, fault
from tests.launch.jobs import wait_until
from varuna import cli
from varuna.testing.faults import Point

LAST = NUM_STEPS - 1


# --- commits --------------------------------------------------------------------------------


def test_a_commit_that_only_lost_workers_saw(start: Start, tmp_path: Path) -> None:
    """Workers 2 and 3 make the update of step 7, tell it and are killed; 0 and 1 did not hear of its commit."""
    run = start(limit=8, script="hooked.py", arguments=["7:0,1"])
    run.steps_done(8)
    wait_until(lambda: len(run.steps(2)) == len(run.steps(3)) == 8, 120, "workers 2 and 3 have made step 7")
    assert len(run.steps(0)) == len(run.steps(1)) == 7
    for doomed in [run.worker(2), run.worker(3)]:
        doomed.kill()
    (tmp_path / "go").touch()
    run.limit(NUM_STEPS)
    assert " from step 8 on" in run.event("running", "generation 1 runs").text
    assert "undone" not in {event.kind for event in run.events.seen}
    ended = run.ends_well()
    assert ended.stderr.count("was killed by SIGKILL") == 2
    run.is_exact()


# --- the last step --------------------------------------------------------------------------


@pytest.mark.parametrize(("point", "victim"), [("reduce", 3), ("committed", 0)])
def test_a_worker_is_killed_in_the_last_step(start: Start, point: Point, victim: int) -> None:
    run = start(fault("kill", victim, point, LAST))
    run.ends_well()
    assert sorted(len(run.steps(worker)) for worker in range(4)) == [LAST, *([NUM_STEPS] * 3)]
    run.is_exact()


def test_a_worker_is_killed_while_others_are_through_with_gathering(start: Start) -> None:
    """Workers 2 and 3 have nothing to send: their scripts are over before worker 1, which has, is killed."""
    run = start(fault("hold", 1, "gather"))
    run.fired(1)
    run.event("finishing", "is over")
    run.worker(1).kill()
    run.ends_well()
    run.is_exact()


def test_worker_0_is_killed_while_it_saves_and_the_job_has_failed(start: Start, tmp_path: Path) -> None:
    run = start(script="saving.py")
    wait_until((tmp_path / "saving").exists, 120, "worker 0 saves")
    run.event("finishing", "is over")
    run.worker(0).kill()
    ended = run.wait()
    assert ended.codes == [137]
    assert "worker 0 was lost after the last step, before its script had ended" in ended.told


def test_a_finished_worker_is_killed_and_the_job_is_done_all_the_same(start: Start, tmp_path: Path) -> None:
    run = start(script="saving.py", stages=4)
    wait_until((tmp_path / "saving").exists, 120, "worker 0 saves")
    run.event("finishing", "is over")
    run.worker(3).kill()
    run.event("lost", "is gone")
    (tmp_path / "go").touch()
    run.ends_well()
    run.is_exact()


# --- the manager ----------------------------------------------------------------------------


def test_a_frozen_manager_is_replaced(start: Start) -> None:
    run = start(fault("kill", 2, "reduce", 25), limit=10, environ={"VARUNA_MANAGER_S": "3"})
    run.steps_done(5)
    manager = run.process("varuna-manager")
    manager.send_signal(signal.SIGSTOP)
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    assert not manager.is_running()
    assert ended.stderr.count(" and is killed; training goes on meanwhile") == 1
    assert ended.stderr.count("the manager has ended by signal 9 and is started again") == 1
    run.is_exact()


# --- those that are lost --------------------------------------------------------------------


def test_a_lost_worker_is_replaced(start: Start) -> None:
    run = start(fault("kill", 2, "reduce", 7), limit=12, environ={"VARUNA_REPLACE_LOST": "1"})
    run.event("adding", "one more worker asked of ")
    run.event("ready")
    run.limit(NUM_STEPS)
    run.event("running", "4 of 4 workers")
    run.ends_well()
    assert run.steps(4)[-1]["index"] == LAST
    run.is_exact()


# --- scripts with two jobs ------------------------------------------------------------------


def test_a_second_job_says_that_it_ends_with_the_first_worker_that_is_lost(start: Start) -> None:
    run = start(script="two_jobs.py", workers=2, stages=1)
    ended = run.ends_well()
    first, second = (line for line in ended.stdout.splitlines() if line.startswith("job "))
    assert first.partition(": ")[2] == second.partition(": ")[2]
    told = ended.stdout + ended.stderr
    assert told.count("only the first job of a script goes on when workers come and go") == 1


# --- the ledger -----------------------------------------------------------------------------


def test_a_run_is_audited_while_it_works_and_afterwards(start: Start, cache: Path, tmp_path: Path) -> None:

    def audit(*arguments: str) -> str:
        done = CliRunner(env={"VARUNA_CACHE_DIR": str(cache)}).invoke(cli.main, ["audit", *arguments])
        assert done.exit_code == 0, done.output
        assert "each once, with its samples" in done.output
        return done.output

    run = start(fault("kill", 3, "reduce", 4), limit=8)
    run.event("running", "generation 1 runs")
    wait_until(lambda: "workers have told all samples of 8 steps" in audit(), 120, "all have told step 7")
    run.kill_manager()
    run.steps_done(8)
    for target in (run.client.run.run_id, str(tmp_path / "logs"), run.client.run.journal):
        assert "8 steps in 2 generations, batches of 12 from " in audit(target)
    run.limit(NUM_STEPS)
    run.ends_well()
    told = f"workers have told all samples of {NUM_STEPS} steps"
    assert told in audit(str(tmp_path / "logs"), "--steps", str(NUM_STEPS))
    run.is_exact()
