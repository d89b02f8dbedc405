"""Tests that run by themselves, because a bound on time is part of what they say (see ``make test``)."""

from __future__ import annotations

from pathlib import Path

import pytest

ALONE = {
    "launch",
    "benchmarks",
    "test_no_hang.py",
    "test_morph_ends.py",
    "test_morph_faults.py",
    "test_morph_forming.py",
    "test_morph_cut.py",
    "test_slow.py",
    "test_soak.py",
    "test_replay.py",
}
"""Folders of such tests, and files."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    here = Path(__file__).parent
    for item in items:
        if ALONE & set(item.path.relative_to(here).parts):
            item.add_marker(pytest.mark.alone)
