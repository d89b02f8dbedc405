"""``pytest tests/plan --regenerate-golden`` writes the golden texts anew; read the diff before committing."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

GOLDEN = Path(__file__).parent / "golden"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--regenerate-golden", action="store_true", help="write tests/plan/golden/*.txt anew")


@pytest.fixture
def check_golden(request: pytest.FixtureRequest) -> Callable[[str, str], None]:
    """``check_golden(name, text)``: the text equals golden/name, or is written there with the flag."""

    def check(name: str, text: str) -> None:
        path = GOLDEN / name
        if request.config.getoption("--regenerate-golden", default=False):
            path.write_text(text, encoding="utf-8")
        assert text == path.read_text(encoding="utf-8"), (
            f"{path} differs; if meant, run with --regenerate-golden"
        )

    return check
