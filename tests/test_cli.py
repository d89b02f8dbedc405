"""The command itself: help without torch, flags, and errors in one line."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

import varuna
from varuna.cli import main
from varuna.plan import render_schedule

PACKAGE_ROOT = str(Path(varuna.__file__).parent.parent)


def invoke(*arguments: str, environ: dict[str, str] | None = None) -> Result:
    return CliRunner().invoke(main, list(arguments), env=environ or {}, prog_name="varuna")


@pytest.mark.parametrize(
    "arguments",
    [["--help"], ["--version"], ["run", "--help"], ["schedule", "1f1b", "-p", "2", "-n", "2"]],
    ids=["help", "version", "run", "schedule"],
)
def test_answers_without_torch(arguments: list[str], tmp_path: Path) -> None:
    code = (
        "import sys\nfrom varuna.cli import main\n"
        f"try:\n    main({arguments!r})\nexcept SystemExit as error:\n    assert not error.code, error.code\n"
        "heavy = {'torch', 'numpy', 'transformers'} & set(sys.modules)\nassert not heavy, heavy\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code],
        cwd=tmp_path,
        env={"PYTHONPATH": PACKAGE_ROOT, "PATH": "/usr/bin:/bin"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout


def test_help_needs_click_alone(tmp_path: Path) -> None:
    """So that it is there in a tenth of a second, whatever a command needs when it runs."""
    code = (
        "import sys\nbefore = set(sys.modules)\nfrom varuna.cli import main\n"
        "try:\n    main(['--help'])\nexcept SystemExit:\n    pass\n"
        "found = {name.partition('.')[0] for name in set(sys.modules) - before} - sys.stdlib_module_names\n"
        "assert found == {'click', 'varuna'}, found\n"
        "slow = {'asyncio', 'importlib.metadata', 'email.parser', 'http.client', 'sqlite3'}\n"
        "slow &= set(sys.modules) - before\n"
        "assert not slow, slow"
    )
    environ = {"PYTHONPATH": PACKAGE_ROOT}
    subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, stdout=subprocess.DEVNULL
    )


def test_the_launcher_starts_without_torch(tmp_path: Path) -> None:
    code = "import sys, varuna.launch.local, varuna.failure\nassert not {'torch', 'numpy'} & set(sys.modules)"
    environ = {"PYTHONPATH": PACKAGE_ROOT}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True)


def test_version_and_help() -> None:
    assert invoke("--version").output.startswith("varuna ")
    help_text = invoke("--help").output
    assert "run" in help_text
    assert "schedule" in help_text
    for flag in (
        "--workers",
        "--stages",
        "--micro-batch-size",
        "--schedule",
        "--no-recompute",
        "--log-dir",
        "--show",
    ):
        assert flag in invoke("run", "--help").output


def test_schedule_prints_what_plan_renders() -> None:
    for recompute in (False, True):
        flags = ("--recompute",) if recompute else ()
        result = invoke("schedule", "varuna", "--stages", "3", "--micro-batches", "4", *flags)
        assert result.exit_code == 0, result.output
        assert result.output == render_schedule("varuna", 3, 4, [recompute, recompute, False]) + "\n"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run"], ["Missing argument 'SCRIPT'"]),
        (["run", "-w", "2", "absent.py"], ["No file 'absent.py'", "-m and a module"]),
        (["run", "-w", "2", "--stages", "3", "absent.py"], ["3 stages need", "there are 2"]),
        (["run", "-w", "0", "absent.py"], ["--workers", "0"]),
        (["run", "--schedule", "zigzag", "absent.py"], ["zigzag", "'varuna', '1f1b', 'gpipe'"]),
        (["run", "--stagez", "3", "absent.py"], ["No such option", "--stagez"]),
        (["schedule", "zigzag", "-p", "2", "-n", "2"], ["zigzag", "gpipe"]),
        (["schedule", "gpipe", "-p", "0", "-n", "2"], ["--stages"]),
    ],
)
def test_wrong_use_is_told_in_one_line(arguments: list[str], words: list[str]) -> None:
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert all(word in result.output for word in words), result.output
    assert "Traceback" not in result.output


def test_a_wrong_variable_is_told_as_a_wrong_flag() -> None:
    result = invoke("run", "-w", "2", "absent.py", environ={"VARUNA_SCHEDULE": "zigzag"})
    assert (result.exit_code, "Unknown schedule 'zigzag'" in result.output) == (2, True)


def test_the_default_number_of_workers_is_told(tmp_path: Path) -> None:
    result = invoke("run", "absent.py", environ={"PATH": str(tmp_path)})
    assert "1 worker: no GPU found; use --workers for more" in result.output
    command = tmp_path / "nvidia-smi"
    command.write_text("#!/bin/sh\necho 'GPU 0: A'; echo 'GPU 1: A'\n")
    command.chmod(0o755)
    environ = {"PATH": f"{tmp_path}:/bin", "CUDA_VISIBLE_DEVICES": "0,1"}
    result = invoke("run", "absent.py", environ=environ)
    assert "2 workers: one per visible GPU (2)" in result.output
