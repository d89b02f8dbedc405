"""Flags that cannot be, or mean nothing together: told in one line, before anything has started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.launch.conftest import Launch
from tests.launch.jobs import PACKAGE_ROOT
from varuna import cli
from varuna.versions import installed_versions


@pytest.fixture
def script(tmp_path: Path) -> str:
    path = tmp_path / "train.py"
    path.write_text("raise SystemExit('it has started')\n")
    return str(path)


def invoke(tmp_path: Path, *arguments: str) -> Result:
    return CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path / "cache")}).invoke(cli.main, list(arguments))


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--address", "10.0.0.1"], "--address 10.0.0.1 is for other machines"),
        (["--env", "SECRET=x"], "--env SECRET is for other machines"),
        (["--env-file", "vars"], "--env-file vars is for other machines"),
        (["--no-morph", "--replace-lost"], "--replace-lost is for a job that goes on when a worker is lost"),
        (["--no-morph", "--hosts", "hosts.txt"], "--no-morph is for one machine; --hosts is for"),
        (["--log-dir", "/proc/none"], "--log-dir /proc/none: no files can be made there: No such file"),
        (
            ["--checkpoint", "s4://bucket/gpt"],
            "s4://bucket/gpt is no place for checkpoints: s4:// is not known",
        ),
        (["--checkpoint", "s3://"], "is no place for checkpoints"),
        (["--checkpoint", "oci://bucket/gpt"], "oci:// needs ocifs, which is not installed"),
    ],
)
def test_of_run(tmp_path: Path, script: str, flags: list[str], words: str) -> None:
    result = invoke(tmp_path, "run", "--workers", "2", *flags, script)
    assert (result.exit_code, words in result.output) == (2, True), result.output
    assert "SECRET=x" not in result.output
    assert isinstance(result.exception, SystemExit), "a traceback"


def test_of_the_environment(tmp_path: Path, script: str) -> None:
    runner = CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path / "cache"), "VARUNA_MORPH": "0"})
    result = runner.invoke(cli.main, ["run", "--workers", "1", "--replace-lost", script])
    assert (result.exit_code, "VARUNA_MORPH=0" in result.output) == (2, True), result.output


def test_of_manager_and_agent(tmp_path: Path, script: str) -> None:
    result = invoke(tmp_path, "manager", "--state", "/proc/none")
    assert (result.exit_code, "--state /proc/none: no files can be made" in result.output) == (2, True)
    runner = CliRunner(env={"VARUNA_CACHE_DIR": str(tmp_path / "cache"), "VARUNA_TOKEN": "t" * 16})
    command = ["agent", "--manager", "http://127.0.0.1:9", "--workers", "1", "--log-dir", "/proc/none", script]
    result = runner.invoke(cli.main, command)
    assert (result.exit_code, "--log-dir /proc/none" in result.output) == (2, True), result.output


def test_a_manager_of_another_version_does_not_take_a_job_over(tmp_path: Path) -> None:
    """Its agents would be refused."""
    state = tmp_path / "state"
    state.mkdir()
    record = {
        "run_id": "job-1",
        "host": "127.0.0.1",
        "port": 1,
        "store_port": 2,
        "min_workers": 1,
        "settle_s": 5.0,
    }
    versions = {"varuna": "9.9.9", "torch": installed_versions().torch, "python": "3.11.2"}
    (state / "manager.json").write_text(json.dumps({**record, "versions": versions}))
    result = subprocess.run(
        [sys.executable, "-m", "varuna", "manager", "--state", str(state)],
        env={**os.environ, "PYTHONPATH": PACKAGE_ROOT},
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert result.returncode == 2, result.stderr
    assert "cannot be managed by this machine: it has varuna 0.1.0, the job has varuna 9.9.9" in result.stderr


def test_micro_batches_larger_than_the_batch_are_every_workers_error(launch: Launch) -> None:
    """Nobody is said to have lost a connection, or to have been waited for."""
    script = """
        import torch, varuna
        model = torch.nn.Linear(4, 2)
        data = torch.utils.data.TensorDataset(torch.randn(64, 4), torch.randn(64, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job = varuna.Varuna(model, optimizer, data, batch_size=16, loss_fn=torch.nn.functional.mse_loss)
        for step in job.train(1):
            pass
    """
    done = launch(script, workers=2, options=("--micro-batch-size", "32")).wait()
    assert done.code == 1
    told = [line for line in done.stderr.splitlines() if line.startswith("varuna: worker")]
    assert len(told) == 2, done.stderr
    assert "A global batch of 16 samples cannot be cut into micro-batches of 32." in told[0]
    assert told[1].endswith("failed with the same error"), told
    assert "Gave up waiting" not in done.stderr
    assert "lost its connection" not in done.stderr
