from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.e2e.jobs import Warm, warm


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process in which jobs start at once."""
    with warm(tmp_path_factory.mktemp("cache")) as served:
        yield served


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Captures of runs that morph, and where these are announced."""
    return tmp_path_factory.mktemp("morph")
