"""Whatever goes wrong on one worker ends the whole job soon, and the report names the cause first.

Most jobs start from a warm process (``tests.e2e.warm``): `varuna run`, or workers that nobody supervises. Those
must end by themselves, for there is no launcher that would kill one that hangs.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

from tests.e2e.jobs import REPOSITORY, SCRIPTS, Ended, Warm
from tests.launch.jobs import Command, wait_until

LIMIT_S = 5.0


def failed(ended: Ended, code: int = 1) -> str:
    """The report of a `varuna run` that ended in time with nothing left and this code."""
    assert ended.codes == [code], ended.stderr
    assert ended.seconds < LIMIT_S, f"{ended.seconds:.1f} s\n{ended.stderr}"
    assert ended.left == []
    return ended.told


def all_ended(ended: Ended) -> dict[int, str]:
    """The output of workers that ended by themselves, in time, none well."""
    assert ended.seconds < LIMIT_S, f"{ended.seconds:.1f} s"
    assert 0 not in ended.codes
    assert ended.left == []
    return ended.outputs


# --- one worker's exception -----------------------------------------------------------------

IN_A_STEP = [
    ("forward", 2, "step 1, pipeline 1, stage 0, micro-batch 4, forward): WorkerFailed: KeyError in forward"),
    (
        "backward",
        3,
        "step 1, pipeline 1, stage 1, micro-batch 4, backward): WorkerFailed: KeyError in backward",
    ),
    ("dataset", 2, "pipeline 1, stage 0, micro-batch"),
    ("collate", 0, "pipeline 0, stage 0, micro-batch"),
    (
        "loss_weight",
        3,
        "step 1, pipeline 1, stage 1, micro-batch 4, forward): WorkerFailed: KeyError in forward",
    ),
    ("optimizer", 1, "step 1, optimizer step): KeyError: 'bad optimizer'"),
    ("evaluate", 1, "pipeline 0, stage 1, micro-batch 0, forward): WorkerFailed: KeyError in forward"),
]


@pytest.mark.parametrize(("where", "rank", "told"), IN_A_STEP, ids=[case[0] for case in IN_A_STEP])
def test_an_exception_on_one_worker_ends_the_job(
    jobs: Warm, tmp_path: Path, where: str, rank: int, told: str
) -> None:
    ended = jobs.run(tmp_path, "faults.py", "raise", where, str(rank)).wait()
    first, *others = failed(ended).splitlines()[1:]
    assert first.startswith(f"varuna: worker {rank} failed (")
    assert told in first
    assert f"bad {where}" in first
    trace, _, _ = ended.stderr.partition(first)
    num_tracebacks = 1 if where == "optimizer" else 2  # of the user's line, then how Varuna came to it
    assert trace.count("Traceback") == num_tracebacks
    assert f"KeyError: 'bad {where}'\n" in trace
    assert "faults.py" in trace
    for other in set(range(4)) - {rank}:
        assert sum(f"worker {other} " in line for line in others) >= 1


@pytest.mark.parametrize("where", ["forward", "backward", "dataset", "optimizer"])
def test_workers_without_a_launcher_end_by_themselves_and_name_the_cause(
    jobs: Warm, tmp_path: Path, where: str
) -> None:
    outputs = all_ended(jobs.run_alone(tmp_path, "faults.py", "raise", where, "2").wait())
    assert f"KeyError: 'bad {where}'" in outputs[2]
    for rank in (0, 1, 3):
        last = outputs[rank].splitlines()[-1]
        assert last.startswith("varuna.errors.PeerLost: ")
        assert "Because worker 2 failed (" in last
        assert f"bad {where}" in last


@pytest.mark.parametrize(
    ("where", "rank", "told"),
    [
        ("build", 2, "worker 2 failed ("),
        ("probe", 0, "DataError: dataset["),
        ("capture", 0, "CaptureError: The model's forward cannot be captured: KeyError: 'bad capture', at "),
    ],
)
def test_an_exception_at_the_start_ends_the_job(
    jobs: Warm, tmp_path: Path, where: str, rank: int, told: str
) -> None:
    ended = jobs.run(tmp_path, "faults.py", "raise", where, str(rank), cache_dir=tmp_path / "cache").wait()
    first = failed(ended).splitlines()[1]
    assert first.startswith(f"varuna: worker {rank} failed (")
    assert told in first


@pytest.mark.parametrize("where", ["probe", "capture"])
def test_workers_that_wait_for_the_start_hear_of_its_failure(jobs: Warm, tmp_path: Path, where: str) -> None:
    job = jobs.run_alone(tmp_path, "faults.py", "raise", where, "0", cache_dir=tmp_path / "cache")
    outputs = all_ended(job.wait())
    for rank in (1, 2, 3):
        assert "PeerLost: Gave up waiting for worker 0" in outputs[rank]
        assert f"bad {where}" in outputs[rank]


def test_an_exception_in_loss_fn_of_a_chain(jobs: Warm, tmp_path: Path) -> None:
    first = failed(jobs.run(tmp_path, "chain.py", "3").wait()).splitlines()[1]
    assert "worker 3 failed (" in first
    assert "stage 1, micro-batch 4, forward): WorkerFailed: KeyError in forward" in first


# --- one worker's death ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("what", "code", "told"),
    [
        ("kill", 137, "worker 2 was killed by SIGKILL (out of memory?)"),
        ("os_exit", 4, "worker 2 exited with code 4 and without a Python exception"),
        ("exit3", 3, "stage 0, micro-batch 4, forward): SystemExit: exit code 3"),
    ],
)
def test_the_end_of_one_process_ends_the_job(
    jobs: Warm, tmp_path: Path, what: str, code: int, told: str
) -> None:
    first, *others = failed(jobs.run(tmp_path, "faults.py", what, "forward", "2").wait(), code).splitlines()[1:]
    assert told in first
    assert sum("lost its connection to another worker (PeerLost: " in line for line in others) >= 1


def test_a_killed_process_ends_workers_without_a_launcher(jobs: Warm, tmp_path: Path) -> None:
    outputs = all_ended(jobs.run_alone(tmp_path, "faults.py", "kill", "backward", "1").wait())
    for rank in (0, 2, 3):
        assert "varuna.errors.PeerLost: " in outputs[rank]


def test_a_worker_that_leaves_the_loop_ends_the_job(jobs: Warm, tmp_path: Path) -> None:
    ended = jobs.run(tmp_path, "faults.py", "leave", "loop", "2").wait()
    assert "its script ended before the others'" in failed(ended)


def test_a_worker_that_leaves_the_loop_ends_a_job_whose_workers_may_come_and_go(
    jobs: Warm, tmp_path: Path
) -> None:
    """There a worker whose script is over stays for the others, who wait for it in the next step."""
    ended = jobs.run(tmp_path, "faults.py", "leave", "loop", "2", morphs=True).wait()
    first = failed(ended).splitlines()[1]
    assert "ProtocolError: The script of worker 2 is over, but worker " in first
    assert " goes on to training step 1. All workers must leave a train loop after the same step" in first


# --- workers that do different things -------------------------------------------------------


def test_evaluate_on_one_worker_is_an_error(jobs: Warm, tmp_path: Path) -> None:
    ended = jobs.run(tmp_path, "faults.py", "evaluate", "loop", "0").wait()
    first = failed(ended).splitlines()[1]
    assert "worker 0 failed (" in first
    assert "ProtocolError: Worker 0 is at evaluate (of 64 samples by 1), but worker " in first
    assert "is at training step 1. Call train, evaluate and full_state_dict on every worker" in first


def test_evaluate_on_one_worker_without_a_launcher(jobs: Warm, tmp_path: Path) -> None:
    outputs = all_ended(jobs.run_alone(tmp_path, "faults.py", "evaluate", "loop", "2").wait())
    assert all("ProtocolError: Worker 2 is at evaluate" in outputs[rank] for rank in range(4))


def test_a_loss_that_is_not_finite_is_the_same_error_everywhere(jobs: Warm, tmp_path: Path) -> None:
    outputs = all_ended(jobs.run_alone(tmp_path, "faults.py", "nan", "dataset", "2").wait())
    messages = {outputs[rank].splitlines()[-1] for rank in range(4)}
    assert len(messages) == 1
    message = messages.pop()
    assert message.startswith("varuna.errors.NonFiniteLoss: Step ")
    assert "on worker 3. No weight was changed." in message


# --- Ctrl-C ---------------------------------------------------------------------------------


@pytest.mark.parametrize("where", ["never", "capture", "evaluate"])
def test_ctrl_c_ends_the_job(jobs: Warm, tmp_path: Path, where: str) -> None:
    job = jobs.run(tmp_path, "faults.py", "block", where, "0", cache_dir=tmp_path / "cache")
    job.wait_for("trains-0" if where == "never" else "fault")
    job.interrupt()
    ended = job.wait()
    told = failed(ended, 130)
    assert told.splitlines()[-1] == "varuna: stopped by SIGINT."
    assert "Traceback" not in ended.stderr


# --- the same, started as a user does ---------------------------------------------------------


def test_varuna_run_from_the_shell(tmp_path: Path) -> None:
    flags = ["run", "--workers", "2", "--stages", "2", "--log-dir", str(tmp_path / "logs")]
    script = [str(SCRIPTS / "faults.py"), "raise", "forward", "1"]
    command = Command([*flags, *script], tmp_path, {"VARUNA_CACHE_DIR": str(tmp_path / "cache")})
    try:
        done = command.wait()
        seconds = time.monotonic() - float((tmp_path / "fault").read_text())
        assert seconds < LIMIT_S
        assert done.code == 1
        assert "varuna: worker 1 failed (" in done.stderr
        assert "stage 1, micro-batch 0, forward): WorkerFailed: KeyError in forward" in done.stderr
        wait_until(lambda: not command.processes(), 5, "processes of the job end")
    finally:
        command.kill_all()


def test_torchrun(tmp_path: Path) -> None:
    flags = ["--standalone", "--nproc-per-node", "2", "--redirects", "2", "--log-dir", str(tmp_path / "logs")]
    script = [str(SCRIPTS / "faults.py"), "raise", "backward", "1"]
    environ = {"VARUNA_STAGES": "2", "VARUNA_CACHE_DIR": str(tmp_path / "cache"), "OMP_NUM_THREADS": "1"}
    others = set(psutil.Process().children(recursive=True))
    process = subprocess.Popen(
        [sys.executable, "-m", "torch.distributed.run", *flags, *script],
        cwd=tmp_path,
        env={**os.environ, **environ, "PYTHONPATH": str(REPOSITORY)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        start_new_session=True,
        text=True,
    )
    try:
        output, _ = process.communicate(timeout=100)
        workers_end_s = max(path.stat().st_mtime for path in tmp_path.glob("logs/**/stderr.log"))
        assert workers_end_s - (tmp_path / "fault").stat().st_mtime < LIMIT_S
        assert process.returncode == 1, output
        logs = {path.parent.name: path.read_text() for path in tmp_path.glob("logs/**/stderr.log")}
        assert "stage 1, micro-batch 0, backward" in logs["1"]
        assert "KeyError: 'bad backward'" in logs["1"]
        assert "Because worker 1 failed (" in logs["0"]
        assert "KeyError in backward of micro-batch 0, step 1 (train)" in logs["0"]
        assert set(psutil.Process().children(recursive=True)) == others
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def test_python_leaves_a_plain_traceback(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(SCRIPTS / "faults.py"), "raise", "forward", "0"],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY), "VARUNA_CACHE_DIR": str(tmp_path / "cache")},
        stderr=subprocess.PIPE,
        text=True,
        timeout=100,
        check=False,
    )
    assert done.returncode == 1
    assert "KeyError: 'bad forward'\n" in done.stderr
    last = done.stderr.splitlines()[-2:]
    assert last[0].startswith(
        "varuna.errors.WorkerFailed: KeyError in forward of micro-batch 0, step 1 (train)"
    )
    assert last[1] == "Varuna: this happened in step 1, pipeline 0, stage 0, micro-batch 0, forward."
