"""``varuna simulate --plan``: the table, the timeline, the files, and what it says about wrong input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from tests.observe.support import two_sections, two_stages
from tests.test_cli import PACKAGE_ROOT
from varuna.cli import main
from varuna.observe.trace import read_trace
from varuna.plan.profile_file import write_plan, write_profile


@pytest.fixture
def files(tmp_path: Path) -> tuple[str, str]:
    """A profile and a plan of two workers and one spare."""
    profile, plan = tmp_path / "profile.json", tmp_path / "plan.json"
    write_profile(two_sections(), profile)
    write_plan(two_stages(num_workers=3), plan)
    return str(profile), str(plan)


def simulate(profile: str, plan: str, *arguments: str) -> Result:
    return CliRunner().invoke(main, ["simulate", profile, "--plan", plan, *arguments], prog_name="varuna")


def test_the_table_has_the_numbers_of_every_stage(files: tuple[str, str]) -> None:
    result = simulate(*files, "--machines", "1x3")
    assert result.exit_code == 0, result.output
    lines = result.output.splitlines()
    assert lines[0].startswith("step 1")
    assert "samples/s, bubble" in lines[0]
    assert lines[1] == "2 of 3 workers, schedule varuna, 4 micro-batches of 2"
    first = next(line for line in lines if line.split()[:3] == ["0", "4", "0"]).split()
    assert first[3:5] == ["0", "yes"]
    assert "1 kB" in " ".join(first)
    assert "of 1 GB" in " ".join(first)


def test_json_has_the_same_numbers_and_no_spans(files: tuple[str, str]) -> None:
    numbers = json.loads(simulate(*files, "--json").output)
    assert numbers["step_s"] == pytest.approx(8 / numbers["samples_per_s"])
    (pipeline,) = numbers["pipelines"]
    assert [stage["worker_index"] for stage in pipeline["stages"]] == [0, 1]
    assert pipeline["stages"][1]["busy_s"] == pytest.approx(4 * 0.030)
    assert "spans" not in pipeline["stages"][0]


def test_timeline_picture_and_trace(files: tuple[str, str], tmp_path: Path) -> None:
    picture, trace = tmp_path / "step.svg", tmp_path / "step.json"
    result = simulate(
        *files, "--timeline", "--width", "60", "--picture", str(picture), "--chrome-trace", str(trace)
    )
    assert result.exit_code == 0, result.output
    assert "worker 2  spare" in result.output
    assert "F0" in result.output
    assert "<svg" in picture.read_text()
    assert [worker.worker_index for worker in read_trace(trace)] == [0, 1, 2]
    shown = CliRunner().invoke(main, ["timeline", str(trace), "--width", "60"])
    assert shown.output in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["simulate", "PROFILE"], "Give --plan"),
        (["simulate", "PROFILE", "--plan", "missing.json"], "Cannot read plan missing.json"),
        (["simulate", "missing.json", "--plan", "PLAN"], "missing.json"),
        (["simulate", "PROFILE", "--plan", "PROFILE"], "is not a plan"),
        (["simulate", "PROFILE", "--plan", "PLAN", "--machines", "4x4"], "and --machines 4x4 has 16"),
        (["simulate", "PROFILE", "--plan", "PLAN", "--json", "--timeline"], "--json and --timeline"),
        (["simulate", "PROFILE", "--plan", "PLAN", "--picture", "x.gif"], "must end in .png"),
        (["run", "--trace-steps", "2:3", "train.py"], "Add --trace FILE"),
        (["run", "--trace", "t.json", "--trace-steps", "3:3", "train.py"], "Write 5:8"),
        (["run", "--trace", "no/t.json", "train.py"], "there is no folder"),
    ],
)
def test_wrong_input_is_told_in_a_line(arguments: list[str], message: str, files: tuple[str, str]) -> None:
    named = {"PROFILE": files[0], "PLAN": files[1]}
    result = CliRunner().invoke(main, [named.get(argument, argument) for argument in arguments])
    assert result.exit_code == 2
    assert message in " ".join(result.output.split())


def test_no_torch_is_needed(files: tuple[str, str], tmp_path: Path) -> None:
    arguments = ["simulate", files[0], "--plan", files[1], "--timeline", "--chrome-trace", "t.json"]
    code = (
        f"import sys\nfrom varuna.cli import main\nmain({arguments!r}, standalone_mode=False)\n"
        "assert 'torch' not in sys.modules"
    )
    environ = {"PYTHONPATH": PACKAGE_ROOT, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path)}
    subprocess.run([sys.executable, "-c", code], cwd=tmp_path, env=environ, check=True, capture_output=True)
