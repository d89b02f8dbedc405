from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest


@pytest.fixture
def local_zone(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[[str], None]]:
    """``local_zone(name)``: this process's time zone until the test ends."""

    def change(name: str) -> None:
        monkeypatch.setenv("TZ", name)
        time.tzset()

    yield change
    monkeypatch.undo()
    time.tzset()
