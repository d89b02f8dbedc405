"""Tests that run by themselves: those that start whole jobs or have a bound on time (see ``make test``)."""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = {"e2e", "launch", "generations", "examples", "benchmarks", "test_replay.py"}
"""Folders of such tests, and files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if ALONE & set(item.path.relative_to(here).parts):
            item.add_marker(pytest.mark.alone)
