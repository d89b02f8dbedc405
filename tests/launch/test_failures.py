"""One worker fails: the job ends soon, its cause is told first, and the exit code is its own."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

from tests.launch.conftest import Launch
from tests.launch.jobs import Finished

FAIL_TOGETHER = """
    import os, select, sys, time
    from pathlib import Path
    from varuna.errors import PeerLost
    from varuna.failure import FailurePlace, mark_place

    rank = int(os.environ["RANK"])
    def forward():
        raise ValueError("bad token 17")
    def step():
        try:
            forward()
        except ValueError as error:
            mark_place(error, FailurePlace(stage_index=1, micro_batch_index=3, operation="forward"))
            raise
    Path(f"runs-{rank}").touch()
    while len(list(Path().glob("runs-*"))) < 4:
        time.sleep(0.01)
    if rank == 2:
        Path("failed").write_text(str(time.monotonic()))
        step()
    while not Path("failed").exists():
        time.sleep(0.01)
    if rank == 0:
        raise PeerLost("Connection to worker 2 broke.")
    select.select([], [], [])  # as a worker that waits for a peer without a time limit
"""

WAIT_FOR_WORKER_1 = """
    import ctypes, os, select, signal, sys, time
    from pathlib import Path
    if os.environ["RANK"] == "1":
        {fault}
    select.select([], [], [])
"""


def run_to_failure(launch: Launch, script: str, workers: int = 3, **options: object) -> Finished:
    command = launch(script, workers=workers, **options)
    done = command.wait()
    assert done.code != 0
    return done


def test_the_cause_comes_first_then_one_line_for_each_other(launch: Launch, tmp_path: Path) -> None:
    command = launch(FAIL_TOGETHER, workers=4)
    done = command.wait()
    ended_s = time.monotonic()
    assert ended_s - float((tmp_path / "failed").read_text()) < 5
    assert done.code == 1
    lines = done.stderr.splitlines()[1:]  # the first names the log directory
    assert lines[0] == "Traceback (most recent call last):"
    assert lines[1].endswith('train.py", line 21, in <module>')  # no line of the launcher's
    report = [line for line in lines if line.startswith("varuna: ")]
    assert report[0].startswith("varuna: worker 2 failed (")
    assert report[0].endswith("stage 1, micro-batch 3, forward): ValueError: bad token 17")
    assert (
        report[1]
        == "varuna: worker 0 lost its connection to another worker (PeerLost: Connection to worker 2 broke.)"
    )
    assert report[2:4] == ["varuna: worker 1 was stopped (SIGTERM)", "varuna: worker 3 was stopped (SIGTERM)"]
    assert done.stderr.count("Traceback") == 1
    assert "ValueError: bad token 17" in (tmp_path / "logs" / "worker-2.log").read_text()
    record = json.loads((tmp_path / "logs" / "worker-2.failure.json").read_text())
    assert record["place"]["stage_index"] == 1
    assert record["is_root_cause"] is True


@pytest.mark.parametrize(
    ("fault", "code", "told"),
    [
        ("sys.exit(5)", 5, "worker 1 failed ("),
        ("os._exit(7)", 7, "worker 1 exited with code 7 and without a Python exception"),
        ("ctypes.string_at(0)", 139, "worker 1 was killed by SIGSEGV (a crash in native code)"),
        ("import if", 1, "SyntaxError: invalid syntax"),
    ],
)
def test_any_death_ends_the_job_with_its_exit_code(launch: Launch, fault: str, code: int, told: str) -> None:
    script = WAIT_FOR_WORKER_1.format(fault=fault)
    done = run_to_failure(launch, script, workers=2, options=("--no-morph",))
    assert done.code == code
    assert told in done.stderr
    if "killed by SIGSEGV" in told:
        assert "--- last output of worker 1 ---" in done.stderr
        assert 'train.py", line 5 in <module>' in done.stderr


def test_workers_that_do_not_listen_are_killed_within_the_bound(launch: Launch, tmp_path: Path) -> None:
    script = """
        import atexit, os, select, signal, time
        from pathlib import Path
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.environ["RANK"] == "1":
            atexit.register(select.select, [], [], [])
            Path("failed").write_text(str(time.monotonic()))
            raise KeyError("cause")
        select.select([], [], [])
    """
    done = run_to_failure(launch, script, workers=2)
    assert time.monotonic() - float((tmp_path / "failed").read_text()) < 5
    assert done.code == 1
    assert "worker 0 was stopped (SIGKILL)" in done.stderr
    assert "KeyError: 'cause'" in done.stderr


def test_a_killed_worker_is_the_cause_not_the_broken_connection_of_its_peer(launch: Launch) -> None:
    script = """
        import os, signal, torch, torch.distributed as dist
        dist.init_process_group("gloo")
        dist.barrier()
        if dist.get_rank() == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        dist.all_reduce(torch.ones(1))
    """
    done = run_to_failure(launch, script, workers=2, options=("--no-morph",))
    assert done.code == 137
    report = [line for line in done.stderr.splitlines() if line.startswith("varuna: worker")]
    assert report[0] == "varuna: worker 1 was killed by SIGKILL (out of memory?)"
    assert report[1].startswith("varuna: worker 0 lost its connection to another worker (")


def test_a_users_exception_hook_is_called(launch: Launch, tmp_path: Path) -> None:
    script = """
        import sys
        from pathlib import Path
        sys.excepthook = lambda kind, error, trace: Path("seen").write_text(f"{kind.__name__} {error}")
        raise RuntimeError("tracked")
    """
    done = run_to_failure(launch, script, workers=1)
    assert (tmp_path / "seen").read_text() == "RuntimeError tracked"
    assert "RuntimeError: tracked" in done.stderr


def test_a_missing_module_is_told(launch: Launch) -> None:
    done = run_to_failure(launch, "", workers=1, options=("-m",))  # the script's name is no module
    assert "ConfigError: No module 'train.py'" in done.stderr


@pytest.mark.parametrize("options", [(), ("--show", "all")])
def test_the_cause_is_told_without_the_folder_of_logs(launch: Launch, options: tuple[str, ...]) -> None:
    """As with a full disk: neither log nor record can be written."""
    script = """
        import os, shutil, time
        from pathlib import Path
        if os.environ["RANK"] == "1":
            shutil.rmtree("logs")
            print("the folder is gone")
            raise ValueError("bad token 17")
        time.sleep(100)
    """
    done = run_to_failure(launch, script, workers=2, options=options)
    assert done.code == 1
    report = done.stderr[done.stderr.index("Traceback (most recent call last):") :]
    assert "ValueError: bad token 17" in report
    assert "varuna: worker 1 failed (" in report
