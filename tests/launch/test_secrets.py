"""What others can see of a job's processes: command lines, and the environment that they were started with."""

from __future__ import annotations

import subprocess
from pathlib import Path

from tests.launch.jobs import Command, wait_until, write_script
from varuna.morph.runs import living_runs

SCRIPT = """
    import os, time
    from pathlib import Path
    assert len(os.environ["VARUNA_TOKEN"]) > 40
    Path(f"ready-{os.environ['RANK']}").touch()
    while not Path("end").exists():
        time.sleep(0.01)
"""


def test_no_command_line_and_no_environment_shows_the_token(tmp_path: Path) -> None:
    write_script(tmp_path, SCRIPT)
    cache = tmp_path / "cache"
    environ = {"VARUNA_CACHE_DIR": str(cache), "VARUNA_CLOUD": "none"}
    manager = Command(
        ["manager", "--state", "state", "--min-workers", "2", "--settle", "0.1"], tmp_path, environ
    )
    commands = [manager]
    try:
        wait_until(lambda: living_runs(cache), 120, "the manager is announced")
        (run,) = living_runs(cache)
        assert run.token == (tmp_path / "state" / "token").read_text().strip()
        where = ["--manager", run.url, "--token-file", "state/token", "--log-dir", "logs"]
        agent = Command(["agent", *where, "--workers", "2", "train.py"], tmp_path, environ)
        commands.append(agent)
        wait_until(
            lambda: all((tmp_path / f"ready-{rank}").exists() for rank in (0, 1)), 60, "both workers run"
        )
        pids = [str(process.pid) for command in commands for process in command.processes()]
        assert len(pids) >= 8  # two commands and their zygotes, manager, store, two workers
        for format_ in ("ww", "eww"):  # "e" shows environments
            shown = subprocess.run(["ps", format_, *pids], capture_output=True, text=True, check=True).stdout
            assert "varuna agent --manager" in shown
            assert ("VARUNA_CACHE_DIR" in shown) == (format_ == "eww")
            assert run.token not in shown
        (tmp_path / "end").touch()
        done = [command.wait() for command in reversed(commands)]
        assert [one.code for one in done] == [0, 0], done
        assert not any(run.token in one.stdout + one.stderr for one in done)
        wait_until(lambda: not any(command.processes() for command in commands), 60, "all end")
        files = [path for path in tmp_path.rglob("*") if path.is_file()]
        assert [path.name for path in files if run.token.encode() in path.read_bytes()] == ["token"]
    finally:
        for command in commands:
            command.kill_all()
