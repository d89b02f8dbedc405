from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.e2e.jobs import Warm, warm


@pytest.fixture(scope="session")
def jobs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Warm]:
    """A process in which jobs start at once."""
    with warm(tmp_path_factory.mktemp("cache")) as served:
        yield served
