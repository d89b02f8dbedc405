"""What is published: a wheel and a source distribution, built from this tree without the network."""

from __future__ import annotations

import email
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import varuna

REPOSITORY = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with both."""
    folder = tmp_path_factory.mktemp("dist")
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(REPOSITORY)]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr
    return folder


def project() -> dict[str, object]:
    table = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]
    assert isinstance(table, dict)
    return table


def test_the_wheel_has_the_package_and_nothing_else(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    assert wheel.name == f"varuna-{varuna.__version__}-py3-none-any.whl"  # pure Python: no compiler
    names = set(zipfile.ZipFile(wheel).namelist())
    notes = f"varuna-{varuna.__version__}.dist-info/"
    there = {name for name in names if not name.startswith(notes)}
    here = {
        str(path.relative_to(REPOSITORY))
        for path in (REPOSITORY / "varuna").rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }
    assert there == here
    assert "varuna/py.typed" in there
    packages = {
        str(path.parent.relative_to(REPOSITORY)) for path in (REPOSITORY / "varuna").rglob("__init__.py")
    }
    assert {"varuna", "varuna/launch", "varuna/morph"} <= packages
    assert {f"{package}/__init__.py" for package in packages} <= there
    assert f"{notes}licenses/LICENSE" in names


def test_the_wheel_says_what_it_is(built: Path) -> None:
    [wheel] = built.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        notes = f"varuna-{varuna.__version__}.dist-info"
        said = email.message_from_bytes(archive.read(f"{notes}/METADATA"))
        commands = archive.read(f"{notes}/entry_points.txt").decode()
    assert said["Name"] == "varuna"
    assert said["Version"] == varuna.__version__
    assert said["Requires-Python"] == ">=3.11"
    assert said["License-Expression"] == "Apache-2.0"
    extras = project()["optional-dependencies"]
    assert isinstance(extras, dict)
    assert set(said.get_all("Provides-Extra")) == set(extras)
    assert "varuna = varuna.cli:main" in commands
    needed = [one for one in said.get_all("Requires-Dist") if "extra ==" not in one]
    assert len(needed) == len(project()["dependencies"])  # type: ignore[arg-type]


def test_the_source_distribution_can_be_built_and_tested(built: Path) -> None:
    [source] = built.glob("*.tar.gz")
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    wanted = {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "Makefile", "varuna/py.typed"}
    assert wanted | {"tests/test_package.py", "examples/gpt.py", "docs/index.md"} <= names
    left = {name for name in names if name.startswith((".venv", ".git/", "build/", "dist/", "runs/"))}
    assert not left
    assert not [name for name in names if "__pycache__" in name]
