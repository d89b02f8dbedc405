"""The exit codes in ``docs/failures.md`` are those of real commands."""

from __future__ import annotations

import os
import re
import signal
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.e2e.jobs import REPOSITORY, SCRIPTS, Warm
from varuna import cli

PAGE = (REPOSITORY / "docs" / "failures.md").read_text(encoding="utf-8")
TABLE = re.findall(r"^\| ([^|]+) \| ([^|]+) \|$", PAGE.partition("## Exit codes of")[2], re.MULTILINE)[1:]


def test_the_table_is_the_one_that_is_tested_here() -> None:
    assert [code for code, _ in TABLE] == ["0", "1", "2", "n", "128 + n", "129, 130, 143"]


@pytest.mark.parametrize(
    ("how", "code", "said"),
    [
        ("well", 0, ""),
        ("raise", 1, "ValueError: as was asked"),
        ("exit", 3, "worker 0 failed"),
        ("kill", 128 + signal.SIGKILL, "worker 0 was killed by SIGKILL (out of memory?)"),
    ],
)
def test_how_a_script_ends(jobs: Warm, tmp_path: Path, how: str, code: int, said: str) -> None:
    ended = jobs.run(tmp_path, "ends.py", how, workers=2, stages=1).wait()
    assert ended.codes == [code], ended.stderr
    assert said in ended.stderr
    assert ended.left == []


@pytest.mark.parametrize("signum", [signal.SIGHUP, signal.SIGINT, signal.SIGTERM])
def test_how_the_command_is_told_to_stop(jobs: Warm, tmp_path: Path, signum: signal.Signals) -> None:
    job = jobs.run(tmp_path, "ends.py", "wait", workers=2, stages=1)
    job.wait_for("waits")
    os.kill(job.pid, signum)
    ended = job.wait()
    assert ended.codes == [128 + signum]
    assert ended.stderr.splitlines()[-1] == f"varuna: stopped by {signum.name}."


def test_wrong_flags() -> None:
    script = str(SCRIPTS / "ends.py")
    done = CliRunner().invoke(cli.main, ["run", "--workers", "2", "--stages", "3", script, "well"])
    assert done.exit_code == 2
    assert "3 stages need as many workers" in done.output
