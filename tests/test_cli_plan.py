"""``varuna plan``: table, JSON, plan file, and what it says about wrong input."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.plan.profiles import make_profile
from varuna.cli import main
from varuna.cli.plan import parse_bytes
from varuna.errors import ConfigError
from varuna.plan.profile_file import read_plan, write_profile


def plan(*arguments: str) -> Result:
    return CliRunner().invoke(main, ["plan", *arguments], prog_name="varuna")


@pytest.fixture
def profile(tmp_path: Path) -> str:
    path = tmp_path / "profile.json"
    write_profile(make_profile(6, device_memory_bytes=20_000), path)
    return str(path)


def test_the_plan_and_why(profile: str, tmp_path: Path) -> None:
    output = tmp_path / "plan.json"
    result = plan(profile, "--machines", "2x3", "--batch-size", "48", "-o", str(output))
    assert result.exit_code == 0, result.output
    assert "a step" in result.output.splitlines()[0]
    assert "samples/s, bubble" in result.output
    assert read_plan(output).num_workers == 6
    simulated = CliRunner().invoke(main, ["simulate", profile, "--plan", str(output), "--machines", "2x3"])
    assert simulated.exit_code == 0, simulated.output


def test_explain_shows_what_else_was_considered(profile: str) -> None:
    lines = plan(profile, "--machines", "2x3", "--batch-size", "48", "--explain").output.splitlines()
    assert any(line.split() and line.split()[-1] == "chosen" for line in lines)
    assert any("slower" in line for line in lines)
    assert any("does not fit" in line for line in lines)


def test_json(profile: str) -> None:
    numbers = json.loads(plan(profile, "--machines", "2x3", "--batch-size", "48", "--json").output)
    assert numbers["plan"]["num_workers"] == 6
    assert numbers["candidates"][0]["step_s"] == numbers["prediction"]["step_s"]
    assert any(row["step_s"] is None for row in numbers["candidates"])
    assert numbers["reason"]


def test_flags_are_kept(profile: str) -> None:
    flags = ["-p", "3", "-b", "2", "--schedule", "1f1b", "--recompute", "--json"]
    chosen = json.loads(plan(profile, "--machines", "6", "--batch-size", "48", *flags).output)["plan"]
    assert [len(pipeline["stages"]) for pipeline in chosen["pipelines"]] == [3, 3]
    assert (chosen["micro_batch_size"], chosen["schedule"]) == (2, "1f1b")
    assert chosen["pipelines"][0]["stages"][0]["recompute"] is True


def test_what_was_assumed_of_a_measured_profile_is_told(tmp_path: Path) -> None:
    notes = ("Links were not measured, one worker was alone: 0.2 ms and 1 GB/s are assumed.",)
    write_profile(make_profile(2, notes=notes), tmp_path / "alone.json")
    result = plan(str(tmp_path / "alone.json"), "--machines", "1x2", "--batch-size", "8")
    assert notes[0] in result.output.splitlines()


def test_ready_profiles_work(tmp_path: Path) -> None:
    result = plan("gpt2-355m@v100@10gbit", "--machines", "2x4", "--batch-size", "64", "--memory", "8GiB")
    assert result.exit_code == 0, result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--machines", "2x3x4"], "cannot be read"),
        (["--machines", "2x3", "--memory", "lots"], "Memory 'lots' cannot be read"),
        (["--machines", "2x3", "--memory", "100B"], "No plan fits"),
        (["--machines", "2x3", "-p", "7"], "7 stages cannot be laid out"),
        (["--machines", "2x3", "-o", "/nowhere/p.json"], "there is no folder /nowhere"),
    ],
)
def test_errors_are_one_line(profile: str, arguments: list[str], message: str) -> None:
    result = plan(profile, "--batch-size", "48", *arguments)
    assert result.exit_code == 2
    error = [line for line in result.output.splitlines() if line.startswith("Error: ")]
    assert len(error) == 1
    assert message in error[0]


@pytest.mark.parametrize(
    ("text", "num_bytes"),
    [("16GB", 16 * 10**9), ("15.5 GiB", int(15.5 * 2**30)), ("800M", 8 * 10**8), ("123", 123), ("1tb", 10**12)],
)
def test_sizes(text: str, num_bytes: int) -> None:
    assert parse_bytes(text) == num_bytes


@pytest.mark.parametrize("text", ["", "GB", "0", "-3GB", "16 G B", "1e9"])
def test_sizes_that_cannot_be_read(text: str) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        parse_bytes(text)
