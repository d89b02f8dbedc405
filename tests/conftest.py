"""Tests that run by themselves, because a bound on time is part of what they say (see ``make test``).

No example of a property has a bound on time: how busy the machine is says nothing of what is tested.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

settings.register_profile("untimed", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("untimed")

HERE = Path(__file__).parent
ALONE = {
    "benchmarks",
    "e2e/test_morph_cut.py",
    "e2e/test_morph_ends.py",
    "e2e/test_morph_faults.py",
    "e2e/test_morph_forming.py",
    "e2e/test_no_hang.py",
    "e2e/test_slow.py",
    "e2e/test_soak.py",
    "launch/test_endings.py",
    "launch/test_failures.py",
    "launch/test_manager_watch.py",
    "launch/test_newcomers.py",
    "launch/test_runs.py",
    "testing/test_replay.py",
}
"""Folders of such tests, and files."""


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--alone", choices=("only", "not"), help="tests that run by themselves, or all others")


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Only what was asked for is imported."""
    wanted = config.getoption("--alone")
    if wanted is None or collection_path.suffix != ".py" or not collection_path.name.startswith("test_"):
        return None
    path = collection_path.relative_to(HERE)
    is_alone = not ALONE.isdisjoint(each.as_posix() for each in (path, *path.parents))
    return True if is_alone != (wanted == "only") else None
