"""Profiles by whole commands: measured at a start, reused at the next, written to a file."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varuna
from tests.cases.jobs import run_workers
from tests.e2e.jobs import SCRIPTS
from tests.launch.jobs import Command, Finished
from varuna.config import LayoutConfig, ProfileConfig
from varuna.plan.profile_file import read_profile
from varuna.run.planning import needs_profile

SCRIPT = str(SCRIPTS / "profiled.py")


def varuna_command(directory: Path, *arguments: str) -> Finished:
    cache = str(directory / "cache")
    environ = {"VARUNA_CACHE_DIR": cache, "OMP_NUM_THREADS": "1", "TMPDIR": str(directory)}  # with its logs
    command = Command(list(arguments), directory, environ)
    try:
        return command.wait()
    finally:
        command.kill_all()


def test_the_first_start_measures_and_the_second_does_not(tmp_path: Path) -> None:
    first = varuna_command(tmp_path, "run", "--workers", "2", SCRIPT, "5")
    assert first.code == 0, first.stderr
    assert "Profile: 3 sections measured in" in first.stderr
    (kept,) = (tmp_path / "cache" / "profiles").glob("*.json")
    assert read_profile(kept).num_refinements == 3  # of five steps: the first is slow, four were told
    second = varuna_command(tmp_path, "run", "--workers", "2", SCRIPT, "1")
    assert "Profile: from an earlier start, refined by 3 steps of training." in second.stderr


def test_a_profile_is_written_and_nothing_is_trained(tmp_path: Path) -> None:
    flags = ["--workers", "2", "--micro-batch-sizes", "4,1"]
    done = varuna_command(tmp_path, "profile", "-o", "out.json", *flags, SCRIPT, "5")
    assert done.code == 0, done.stderr
    assert done.stdout == ""  # no step, and no handler of the user saw the end
    assert "Traceback" not in done.stderr
    assert "profile written to out.json" in done.stderr
    profile = read_profile(tmp_path / "out.json")
    assert [costs.micro_batch_size for costs in profile.sections[0].costs] == [1, 4]
    assert profile.all_reduce


def test_a_script_without_a_job_has_no_profile(tmp_path: Path) -> None:
    (tmp_path / "nothing.py").write_text("print('hello')\n")
    done = varuna_command(tmp_path, "profile", "-o", "out.json", "nothing.py")
    assert done.code == 2
    assert "ended without starting a job" in done.stderr
    assert not (tmp_path / "out.json").exists()


@pytest.mark.parametrize("sizes", ["0,1", "a", "1;2"])
def test_sizes_that_cannot_be_read(tmp_path: Path, sizes: str) -> None:
    done = varuna_command(tmp_path, "profile", "-o", "out.json", "--micro-batch-sizes", sizes, SCRIPT)
    assert done.code == 2
    assert f"--micro-batch-sizes='{sizes}' is no list" in done.stderr


def test_without_a_profile_the_layout_is_the_plain_one(tmp_path: Path) -> None:
    done = varuna_command(tmp_path, "run", "--workers", "2", "--no-profile", SCRIPT, "1")
    assert done.code == 0, done.stderr
    assert "Profile" not in done.stderr
    assert "2 x 1 x 2" in done.stdout


# --- what is trained is the same ------------------------------------------------------------


class Halves(nn.Module):
    """Two sections, so that two stages have one layout; dropout and running statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.cut = nn.Linear(8, 16), nn.BatchNorm1d(16), varuna.CutPoint()
        self.dropout, self.head = nn.Dropout(0.2), nn.Linear(16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return F.softplus(self.head(self.dropout(self.cut(self.norm(self.first(x)))))).mean()


def train(profile: str) -> dict[str, Any]:
    os.environ["VARUNA_PROFILE"] = profile
    torch.manual_seed(0)
    model = Halves()
    data = torch.utils.data.TensorDataset(torch.randn(32, 8))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    events: list[str] = []
    job = varuna.Varuna(
        model,
        optimizer,
        data,
        batch_size=12,
        layout=LayoutConfig(num_stages=2, micro_batch_size=4, schedule="1f1b", recompute=False),
        progress=lambda event: events.append(type(event).__name__),
    )
    losses = [step.loss for step in job.train(3)]
    return {
        "losses": losses,
        "state": job.full_state_dict(),
        "drawn": torch.rand(4),
        "measured": "ProfileMeasured" in events,
    }


def test_training_after_measuring_is_bit_for_bit_training_without() -> None:
    with_profile, without = run_workers(2, train, "1"), run_workers(2, train, "0")
    assert with_profile[0]["measured"]
    assert not without[0]["measured"]
    for mine, theirs in zip(with_profile, without, strict=True):
        assert mine["losses"] == theirs["losses"]
        assert torch.equal(mine["drawn"], theirs["drawn"])
        assert mine["state"].keys() == theirs["state"].keys()
        for name, value in mine["state"].items():
            assert torch.equal(value, theirs["state"][name]), name


def train_unlike(_: str) -> bool:
    return bool(train("1" if os.environ["RANK"] == "0" else "0")["losses"])


def test_worker_0_decides_whether_to_measure() -> None:
    assert run_workers(2, train_unlike, "") == [True, True]


# --- when there is something to choose ------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "layout", "there", "expected"),
    [
        ({}, {}, (1, 3, 8), True),  # m
        ({}, {}, (4, 3, 1), True),  # P
        ({}, {"num_stages": 2}, (4, 3, 8), True),
        ({}, {"micro_batch_size": 2}, (4, 3, 8), True),
        ({}, {"micro_batch_size": 2}, (1, 3, 8), False),
        ({}, {"micro_batch_size": 2}, (4, 1, 8), False),
        ({}, {}, (1, 3, 1), False),
        ({}, {"num_stages": 2, "micro_batch_size": 2}, (4, 3, 8), False),
        ({"wanted": True}, {"num_stages": 2, "micro_batch_size": 2}, (4, 3, 8), True),
        ({"wanted": False}, {}, (4, 3, 8), False),
        ({"wanted": False, "output": Path("x")}, {}, (4, 3, 8), True),
    ],
)
def test_a_model_is_measured_where_something_is_left_to_choose(
    config: dict[str, Any], layout: dict[str, Any], there: tuple[int, int, int], expected: bool
) -> None:
    workers, sections, batch_size = there
    found = needs_profile(ProfileConfig(**config), LayoutConfig(**layout), workers, sections, batch_size)
    assert found == expected
