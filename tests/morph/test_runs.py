"""How commands find a run, and what they understand."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from click.testing import CliRunner
from msgspec import structs

from tests.launch.jobs import wait_until
from tests.morph.serving import TOKEN, ServedManager, place
from varuna import cli
from varuna.errors import ConfigError
from varuna.morph.client import RunClient, resolve
from varuna.morph.messages import WorkerStarted, encode
from varuna.morph.runs import RunInfo, find_run, living_runs, write_run
from varuna.morph.views import Status, WorkerState


def run_info(run_id: str, started_s: float = 1.0, pid: int | None = None) -> RunInfo:
    return RunInfo(
        run_id=run_id, url="http://127.0.0.1:1", token=TOKEN, pid=pid or os.getpid(), started_s=started_s
    )


def test_a_run_is_announced_to_its_owner_alone(tmp_path: Path) -> None:
    path = write_run(run_info("one"), tmp_path)
    assert path.stat().st_mode & 0o777 == 0o600
    assert path.parent.stat().st_mode & 0o777 == 0o700
    assert find_run(tmp_path) == run_info("one")
    assert TOKEN not in repr(run_info("one"))
    assert list(path.parent.iterdir()) == [path]


def test_the_newest_run_is_meant_unless_one_is_named(tmp_path: Path) -> None:
    for run_id, started_s in (("b", 2.0), ("c", 3.0), ("a", 1.0)):
        write_run(run_info(run_id, started_s), tmp_path)
    assert find_run(tmp_path).run_id == "c"
    assert find_run(tmp_path, "a").run_id == "a"
    with pytest.raises(ConfigError, match="No run 'd' with a manager on this machine; running: a, b, c"):
        find_run(tmp_path, "d")


def test_a_run_whose_launcher_was_killed_is_forgotten(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = write_run(run_info("gone", pid=gone.pid), tmp_path)
    assert living_runs(tmp_path) == []
    assert not path.exists()
    with pytest.raises(ConfigError, match="No run with a manager on this machine; running: none"):
        find_run(tmp_path)


def test_runs_of_another_host_in_a_shared_folder_are_left_alone(tmp_path: Path) -> None:
    gone = subprocess.Popen([sys.executable, "-c", ""])
    gone.wait()
    path = write_run(structs.replace(run_info("far", pid=gone.pid), host="another-host"), tmp_path)
    assert living_runs(tmp_path) == []
    assert path.exists()


def test_a_file_that_is_none_is_named(tmp_path: Path) -> None:
    (tmp_path / "runs").mkdir()
    (tmp_path / "runs" / "x.json").write_text("{}")
    with pytest.raises(ConfigError, match=r"x\.json cannot be read"):
        living_runs(tmp_path)


# --- who is meant ---------------------------------------------------------------------------


def worker(incarnation: str, machine: str, status: str = "member") -> WorkerState:
    return WorkerState(
        incarnation=incarnation,
        machine=machine,
        status=status,
        rank=None,
        position="",
        leaving="",
        gone_reason="",
        is_connected=True,
    )


STATUS = Status(
    phase="running",
    reason="",
    generation=0,
    plan=None,
    num_committed=3,
    workers=(
        worker("a.b.0.11aa", "a.b"),
        worker("a.b.2.22bb", "a.b"),
        worker("c.0.33cc", "c"),
        worker("c.1.44dd", "c", "gone"),
        worker("c.1.55ee", "c"),
        worker("gone.7.66ff", "gone", "gone"),
    ),
    events=(),
)


@pytest.mark.parametrize(
    ("target", "meant"),
    [
        ("a.b.0.11aa", ("a.b.0.11aa", "")),
        ("2", ("a.b.2.22bb", "")),
        ("worker 2", ("a.b.2.22bb", "")),
        ("worker-1", ("c.1.55ee", "")),
        ("c", ("", "c")),
        ("a.b", ("", "a.b")),
    ],
)
def test_workers_and_machines_as_people_call_them(target: str, meant: tuple[str, str]) -> None:
    assert resolve(target, STATUS) == meant


@pytest.mark.parametrize(
    ("target", "told"),
    [
        ("0", "'0' may be any of a.b.0.11aa, c.0.33cc. Give the whole name."),
        ("7", "'7' is no living worker and no machine."),
        ("c.1.44dd", "is no living worker"),
        ("gone", "machines: a.b, c."),
        ("", "is no living worker"),
    ],
)
def test_nobody_or_too_many_may_be_meant(target: str, told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        resolve(target, STATUS)


# --- commands -------------------------------------------------------------------------------


def test_commands_against_a_manager(tmp_path: Path) -> None:
    runner = CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path), "COLUMNS": "150"})
    with place() as at:
        served = ServedManager(at)
        for index in range(2):
            started = WorkerStarted(incarnation=f"vm.{index}.abcd", machine="vm", rank=index)
            at.loop.call(served.hub.from_agent, "vm", encode(started))
        write_run(RunInfo(run_id="a-run", url=at.url, token=TOKEN, pid=os.getpid(), started_s=1.0), tmp_path)
        shown = runner.invoke(cli.main, ["status"])
        assert shown.exit_code == 0, shown.output
        assert "a-run: founding, generation 0, 0 steps done" in shown.output
        assert "vm.1.abcd" in shown.output
        asked = runner.invoke(cli.main, ["preempt", "1", "--deadline", "30", "--run", "a-run"])
        assert (asked.exit_code, asked.output) == (0, "asked to leave: vm.1.abcd\n")
        assert "leaving (user)" in runner.invoke(cli.main, ["status"]).output
        told = runner.invoke(cli.main, ["events"])
        assert '"kind":"notice"' in told.output
        nobody = runner.invoke(cli.main, ["preempt", "5"])
        assert nobody.exit_code == 2
        assert (
            "'5' is no living worker and no machine. Workers: vm.0.abcd, vm.1.abcd; machines: vm."
            in nobody.output
        )
        added = runner.invoke(cli.main, ["workers", "add", "1"])
        assert added.exit_code == 2
        assert "Workers cannot be added: no agent is connected." in added.output
        wrong = RunInfo(run_id="b", url=at.url, token="wrong", pid=os.getpid(), started_s=2.0)
        with pytest.raises(ConfigError, match="the job's token is missing or wrong"):
            RunClient(wrong, tmp_path).status()
        at.end()
        at.close()
        silent = runner.invoke(cli.main, ["status"])
        assert silent.exit_code == 2
        assert "The manager of run a-run at http://127.0.0.1:" in silent.output
        assert "does not answer" in silent.output


def test_commands_without_a_run(tmp_path: Path) -> None:
    runner = CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path)})
    for arguments in (
        ["status"],
        ["status", "--watch"],
        ["events", "-f"],
        ["preempt", "1"],
        ["workers", "add", "1"],
    ):
        done = runner.invoke(cli.main, arguments)
        assert done.exit_code == 2
        assert "No run with a manager on this machine" in done.output


def test_watching_ends_with_the_run(tmp_path: Path) -> None:
    runner = CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path)})
    launcher = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE, text=True)
    with place() as at:
        served = ServedManager(at)
        run = RunInfo(run_id="a-run", url=at.url, token=TOKEN, pid=launcher.pid, started_s=1.0)
        write_run(run, tmp_path)
        done: list[str] = []
        watching = threading.Thread(
            target=lambda: done.append(runner.invoke(cli.main, ["status", "--watch"]).output)
        )
        watching.start()
        wait_until(lambda: served.num_asked() > 1, 120, "it looks twice")
        launcher.communicate("end\n")
        watching.join(20)
        assert not watching.is_alive()
        assert "a-run: founding" in done[0]
