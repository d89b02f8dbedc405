from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.e2e.jobs import Warm, warm
from tests.e2e.morphing import Fault, Run


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process in which jobs start at once."""
    with warm(tmp_path_factory.mktemp("cache")) as served:
        yield served


Start = Callable[..., Run]


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of runs that morph, and where these are announced."""
    return tmp_path_factory.mktemp("morph")


@pytest.fixture
def start(jobs: Warm, tmp_path: Path, cache: Path) -> Iterator[Start]:
    """Starts the test's run; see ``Run``."""
    runs: list[Run] = []

    def start(*faults: Fault, **options: Any) -> Run:
        runs.append(Run(jobs, tmp_path, cache, *faults, **options))
        return runs[0]

    yield start
    for run in runs:
        run.abandon()
