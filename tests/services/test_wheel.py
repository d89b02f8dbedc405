"""The wheel in an empty environment: it installs without compilers, its command runs, its extras resolve.

Packages come from wherever pip is told to take them.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

pytestmark = [pytest.mark.services, pytest.mark.timeout(1800)]

REPOSITORY = Path(__file__).parents[2]
EXTRAS = sorted(tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["optional-dependencies"])
TRAIN = """
import torch, varuna
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 2))
data = torch.utils.data.TensorDataset(torch.randn(32, 4), torch.randint(2, (32,)))
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job = varuna.Varuna(model, optimizer, data, batch_size=8, loss_fn=torch.nn.functional.cross_entropy)
for step in job.train(num_steps=3):
    if job.rank == 0:
        print("step", step.index, flush=True)
"""


def run(*command: str | Path, cwd: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=cwd, env=environ, capture_output=True, text=True, check=False)


def pip(python: Path, *arguments: str, cwd: Path) -> str:
    """What it prints; only wheels are taken."""
    command = (python, "-m", "pip", "--disable-pip-version-check", *arguments, "--only-binary", ":all:")
    result = run(*command, cwd=cwd, **os.environ)
    assert result.returncode == 0, result.stdout[-4000:] + result.stderr[-4000:]
    return result.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    command = (sys.executable, "-m", "build", "--no-isolation", "--outdir", folder, REPOSITORY)
    result = run(*command, cwd=folder, **os.environ)
    assert result.returncode == 0, result.stdout + result.stderr
    [found] = folder.glob("*.whl")
    return found


@pytest.fixture(scope="module")
def python(tmp_path_factory: pytest.TempPathFactory, wheel: Path) -> Path:
    """Of an environment with nothing but torch (in the build that the Makefile is told) and the wheel."""
    folder = tmp_path_factory.mktemp("empty")
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    made = folder / "bin" / "python"
    pip(made, "install", "--quiet", *os.environ.get("TORCH", "torch==2.13.0").split(), cwd=folder)
    pip(made, "install", "--quiet", str(wheel), cwd=folder)
    return made


def test_the_command_is_there_and_trains(python: Path, tmp_path: Path) -> None:
    environ = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    helped = run(python.parent / "varuna", "--help", cwd=tmp_path, **environ)
    assert helped.returncode == 0, helped.stderr
    assert "Train PyTorch models too large for one GPU" in helped.stdout
    where = run(python, "-c", "import varuna; print(varuna.__file__)", cwd=tmp_path, **environ).stdout
    assert Path(where.strip()).is_relative_to(python.parents[1])
    (tmp_path / "train.py").write_text(TRAIN)
    command = (python.parent / "varuna", "run", "--workers", "2", "--stages", "2", "train.py")
    trained = run(*command, cwd=tmp_path, VARUNA_CLOUD="none", TMPDIR=str(tmp_path), **environ)
    assert trained.returncode == 0, trained.stderr
    assert trained.stdout.split() == ["step", "0", "step", "1", "step", "2"]


@pytest.mark.parametrize("extra", EXTRAS)
def test_extras_resolve(python: Path, wheel: Path, extra: str, tmp_path: Path) -> None:
    said = pip(python, "install", "--dry-run", f"varuna[{extra}] @ {wheel.as_uri()}", cwd=tmp_path)
    assert "Would install" in said or "already satisfied" in said
