"""Jobs that are ended from outside leave nothing behind (F68)."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from tests.launch.conftest import Launch
from tests.launch.jobs import Command, wait_until

WORKERS = 3
WAIT_FOREVER = """
    import os, select, subprocess, sys, time
    from pathlib import Path
    rank = os.environ["RANK"]
    child = subprocess.Popen(["sleep", "1000"])
    apart = subprocess.Popen(["sleep", "1000"], start_new_session=True)
    Path(f"ready-{rank}.part").write_text(f"{os.getpid()} {child.pid} {apart.pid}")
    Path(f"ready-{rank}.part").rename(f"ready-{rank}")
    try:
        select.select([], [], [])
    finally:
        Path(f"left-{rank}").touch()
"""
IGNORE_EVERYTHING = """
    import signal
    for signum in (signal.SIGINT, signal.SIGTERM):
        signal.signal(signum, signal.SIG_IGN)
"""


def start(
    launch: Launch, tmp_path: Path, script: str = WAIT_FOREVER, *options: str
) -> tuple[Command, list[int]]:
    """A job whose workers all wait, and the process ids of them and what they started."""
    command = launch(script, workers=WORKERS, options=options)
    paths = [tmp_path / f"ready-{rank}" for rank in range(WORKERS)]
    wait_until(lambda: all(path.exists() for path in paths), 120, "all workers wait")
    return command, [int(pid) for path in paths for pid in path.read_text().split()]


def gone(pids: list[int]) -> bool:
    """No process of these numbers exists, not even as a zombie."""
    return not any(psutil.pid_exists(pid) for pid in pids)


@pytest.mark.parametrize(
    ("end", "code", "name"),
    [
        (lambda command: command.signal(signal.SIGINT), 130, "SIGINT"),
        (lambda command: command.signal_group(signal.SIGINT), 130, "SIGINT"),
        (lambda command: command.signal(signal.SIGTERM), 143, "SIGTERM"),
    ],
    ids=["ctrl-c", "ctrl-c to the group", "terminate"],
)
def test_a_signal_ends_everything_quietly(
    launch: Launch, tmp_path: Path, end: Callable[[Command], None], code: int, name: str
) -> None:
    command, pids = start(launch, tmp_path)
    started_s = time.monotonic()
    end(command)
    done = command.wait(10)
    assert time.monotonic() - started_s < 5
    assert done.code == code
    assert done.stderr.splitlines()[1:] == [f"varuna: stopped by {name}."]
    assert gone(pids)
    if code == 130:  # KeyboardInterrupt reached the users' code
        assert all((tmp_path / f"left-{rank}").exists() for rank in range(WORKERS))


def test_ctrl_c_ends_workers_that_do_not_listen(launch: Launch, tmp_path: Path) -> None:
    command, pids = start(launch, tmp_path, IGNORE_EVERYTHING + WAIT_FOREVER)
    started_s = time.monotonic()
    command.signal(signal.SIGINT)
    assert command.wait(10).code == 130
    assert time.monotonic() - started_s < 5
    assert gone(pids)


def test_a_second_ctrl_c_does_not_wait(launch: Launch, tmp_path: Path) -> None:
    command, pids = start(launch, tmp_path, IGNORE_EVERYTHING + WAIT_FOREVER)
    started_s = time.monotonic()
    command.signal(signal.SIGINT)
    command.signal(signal.SIGTERM)  # another number, for the same one twice may arrive as one
    assert command.wait(10).code in (130, 143)  # the kernel may deliver them in either order
    assert time.monotonic() - started_s < 3  # the third step of one request comes later
    assert gone(pids)


def test_ctrl_c_before_the_workers_start(launch: Launch) -> None:
    command = launch("print('never')", workers=2)
    wait_until(lambda: len(command.processes()) > 1, 120, "the zygote starts")
    command.signal(signal.SIGINT)
    done = command.wait(10)
    assert (done.code, done.stdout) == (130, "")


@pytest.mark.parametrize("victim", ["launcher", "zygote"])
def test_nothing_outlives_the_launcher_or_the_zygote(launch: Launch, tmp_path: Path, victim: str) -> None:
    command, pids = start(launch, tmp_path)
    zygote = psutil.Process(command.process.pid).children()[0]
    everything = [*pids, *(child.pid for child in zygote.children(recursive=True))]
    working = [child for child in zygote.children() if child.name() != "varuna-compile"]
    assert len(working) == WORKERS + 2  # the store and the manager, too
    (zygote if victim == "zygote" else command.process).kill()
    done = command.wait(10)
    assert done.code == (1 if victim == "zygote" else -signal.SIGKILL)
    wait_until(lambda: gone(everything), 5, "workers, store and what they started are gone")
    if victim == "zygote":
        assert "the process that starts workers ended by signal 9" in done.stderr


def test_without_a_manager_a_dead_store_ends_the_job(launch: Launch, tmp_path: Path) -> None:
    command, pids = start(launch, tmp_path, WAIT_FOREVER, "--no-morph")
    zygote = psutil.Process(command.process.pid).children()[0]
    store = next(child for child in zygote.children() if child.name() == "varuna-store")
    store.kill()
    done = command.wait(10)
    assert done.code == 1
    assert "the process that hosts the rendezvous store died" in done.stderr
    assert gone(pids)


def test_a_job_that_ends_well_leaves_no_background_process(launch: Launch, tmp_path: Path) -> None:
    script = """
        import subprocess
        from pathlib import Path
        children = [subprocess.Popen(["sleep", "1000"], start_new_session=apart) for apart in (False, True)]
        Path("pids").write_text(" ".join(str(child.pid) for child in children))
        for child in children:
            child.returncode = 0  # so that the interpreter does not warn
    """
    done = launch(script, workers=1).wait()
    assert done.code == 0, done.stderr
    assert gone([int(pid) for pid in (tmp_path / "pids").read_text().split()])
