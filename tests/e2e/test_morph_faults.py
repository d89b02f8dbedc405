"""Workers that freeze or fail, managers that die, and ends that must come: by whole commands."""

from __future__ import annotations

import http.client
import signal
from pathlib import Path
from urllib.parse import urlsplit

import pytest

from tests.e2e.conftest import Start
from tests.e2e.morphing import NUM_STEPS, Run, fault
from tests.launch.jobs import wait_until
from varuna.errors import ConfigError

HEARTBEAT = {"VARUNA_HEARTBEAT_S": "3"}


# --- frozen ---------------------------------------------------------------------------------


def test_a_frozen_worker_is_fenced_and_killed(start: Start) -> None:
    run = start(fault("freeze", 2, "forward", 6, 2), environ=HEARTBEAT)
    run.fired(2)
    run.event("fenced", "no sign of life for ")
    ended = run.ends_well()
    assert ended.stderr.count("varuna: worker 2 does not answer and is killed; the others go on") == 1
    assert "out of memory" not in ended.stderr
    assert len(run.steps(2)) == 6
    run.is_exact()


def test_a_worker_that_thaws_finds_itself_refused_and_ends(start: Start) -> None:
    """The launcher is frozen too, as with a whole machine: nobody can kill the frozen worker."""
    run = start(fault("freeze", 2, "forward", 6, 2), environ=HEARTBEAT, limit=4)
    run.event("running", "generation 0 runs")  # the manager has heard of all, from them and from the launcher
    run.limit(20)
    run.fired(2)
    frozen, launcher = run.worker(2), run.process("varuna-worker-2").parent().parent()
    launcher.send_signal(signal.SIGSTOP)
    run.event("fenced", "no sign of life for ")
    run.event("running", "generation 1 runs")
    run.steps_done(15)
    assert frozen.is_running()
    frozen.send_signal(signal.SIGCONT)
    wait_until(lambda: not frozen.is_running(), 120, "the fenced worker ends by itself")
    assert len(run.steps(2)) == 6
    launcher.send_signal(signal.SIGCONT)
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    told = [line for line in ended.stderr.splitlines() if "worker 2" in line]
    # the launcher may hear the manager's order to kill it just before it hears that it has ended
    assert told in ([], ["varuna: worker 2 does not answer and is killed; the others go on"])
    run.is_exact()


def test_a_busy_worker_is_not_fenced(start: Start) -> None:
    """Worker 2 is in user code for longer than the limit."""
    environ = {"VARUNA_HEARTBEAT_S": "1"}
    run = start(fault("hold", 2, "forward", 6, 2), environ=environ)
    run.fired(2)
    wait_until(lambda: run.status().num_committed == 6, 120, "the manager has heard of all steps")
    with pytest.raises(AssertionError, match="not within 3 s"):
        wait_until(lambda: run.status().num_committed > 6 or run.status().generation > 0, 3)
    run.script.release()
    ended = run.ends_well()
    assert "go on" not in ended.stderr
    run.is_exact()


# --- the manager ----------------------------------------------------------------------------


def test_the_manager_is_killed_and_knows_everything_when_it_is_back(start: Start) -> None:
    run = start(fault("kill", 2, "reduce", 25), limit=10)
    run.steps_done(5)
    run.kill_manager()
    run.limit(20)
    wait_until(lambda: len(run.steps(0)) == 20, 120, "training goes on")
    run.limit(NUM_STEPS)
    run.event("running", "generation 1 runs")
    ended = run.ends_well()
    assert ended.stderr.count("varuna: the manager has ended by signal 9 and is started again") == 1
    run.fired(2)
    run.is_exact()


def test_the_manager_is_killed_while_a_generation_forms(start: Start) -> None:
    faults = [fault("kill", 3, "reduce", 6), fault("hold", 0, "form", 6)]
    run = start(*faults)
    run.fired(0)
    assert run.status().phase == "forming"
    run.kill_manager()
    run.script.release()
    ended = run.ends_well()
    assert "the manager has ended by signal 9" in ended.stderr
    run.is_exact()


def test_a_worker_dies_while_there_is_no_manager(start: Start) -> None:
    """The manager is stopped, and killed only after the worker has died."""
    run = start(fault("kill", 1, "forward", 10), limit=8)
    run.steps_done(8)
    manager = run.process("varuna-manager")
    manager.send_signal(signal.SIGSTOP)
    run.limit(NUM_STEPS)
    run.fired(1)
    wait_until(lambda: not _alive(run, 1), 120, "worker 1 is gone")
    run.kill_manager()
    run.ends_well()
    run.is_exact()


def _alive(run: Run, worker: int) -> bool:
    try:
        return run.worker(worker).is_running()
    except ValueError:
        return False


# --- strangers ------------------------------------------------------------------------------


def test_strangers_change_nothing(start: Start) -> None:
    run = start(limit=8)
    run.steps_done(4)
    address = urlsplit(run.client.run.url)
    before = run.status().workers
    for headers in ({}, {"Authorization": "Bearer wrong"}, {"Authorization": run.client.run.token}):
        for method, path in (("GET", "/status"), ("POST", "/preempt"), ("GET", "/worker?incarnation=x")):
            connection = http.client.HTTPConnection(address.hostname, address.port, timeout=10)
            connection.request(method, path, body=b'{"worker":"x"}', headers=headers)
            response = connection.getresponse()
            assert response.status == 401
            assert b"token" in response.read()
            connection.close()
    with pytest.raises(ConfigError, match="is no living worker and no machine"):
        run.client.preempt("nobody")
    assert run.status().workers == before
    run.limit(NUM_STEPS)
    run.ends_well()
    run.is_exact()


def test_the_token_is_in_no_command_line_log_or_journal(start: Start, tmp_path: Path, cache: Path) -> None:
    run = start(limit=8)
    run.steps_done(4)
    token = run.client.run.token
    (announced,) = (cache / "runs").iterdir()
    assert announced.stat().st_mode & 0o777 == 0o600
    for process in run.everyone():
        assert token not in " ".join(process.cmdline())
    run.limit(NUM_STEPS)
    run.ends_well()
    for path in (tmp_path / "logs").iterdir():
        assert token.encode() not in path.read_bytes()


# --- failures -------------------------------------------------------------------------------


def test_a_failure_ends_the_job_as_ever(start: Start) -> None:
    run = start(fault("raise", 1, "forward", 5))
    ended = run.wait()
    assert ended.codes == [1]
    assert ended.told.splitlines()[1].startswith("varuna: worker 1 failed (")
    assert "RuntimeError: scripted on worker 1" in ended.stderr


def test_a_newcomer_that_fails_ends_nothing(start: Start) -> None:
    run = start(fault("raise", 2, "start", 0), workers=2, limit=8)
    run.steps_done(4)
    run.client.add_workers(1)
    run.event("lost", "newcomer ")
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    assert "RuntimeError: scripted on worker 2; the others go on" in ended.stderr
    run.is_exact()


def test_a_newcomer_that_fails_at_work_ends_the_job(start: Start) -> None:
    run = start(fault("raise", 2, "step", 30), workers=2, stages=1, limit=8)
    run.steps_done(4)
    run.client.add_workers(1)
    run.event("ready")
    run.limit(NUM_STEPS)
    ended = run.wait()
    assert ended.codes == [1]
    assert "varuna: worker 2 failed (" in ended.told
    assert "RuntimeError: scripted on worker 2" in ended.stderr


def test_without_any_holder_of_a_section_the_job_ends_and_says_why(start: Start) -> None:
    run = start(fault("kill", 2, "forward", 5), stages=4)
    ended = run.wait()
    assert ended.codes == [137]
    assert "varuna: worker 2 was killed by SIGKILL (out of memory?)" in ended.told
    assert "varuna: the job cannot go on: no worker is left that holds section" in ended.told


def test_the_last_worker_is_killed(start: Start) -> None:
    faults = [fault("kill", 1, "forward", 5), fault("kill", 0, "step", 9)]
    run = start(*faults, workers=2, stages=1)
    ended = run.wait()
    assert ended.codes == [137]
    assert "varuna: worker 0 was killed by SIGKILL" in ended.told


def test_a_founder_is_killed_before_the_first_generation(start: Start) -> None:
    run = start(fault("kill", 1, "start", 0))
    ended = run.wait()
    assert ended.codes == [137]
    assert "varuna: worker 1 was killed by SIGKILL" in ended.told
    assert "a worker was lost before the first generation was formed" in ended.told
