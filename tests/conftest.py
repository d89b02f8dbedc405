"""Tests that run by themselves: those that start whole jobs or have a bound on time (see ``make test``)."""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = ("e2e", "launch", "generations", "examples", "benchmarks")
"""Folders of such tests."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if item.path.relative_to(here).parts[0] in ALONE:
            item.add_marker(pytest.mark.alone)
