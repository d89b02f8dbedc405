"""The guide that ports a Trainer script: its diff is that of the two scripts."""

from __future__ import annotations

import difflib
from pathlib import Path

GUIDES = Path(__file__).parents[2] / "docs" / "guides"


def test_the_diff_in_the_guide_is_that_of_the_scripts() -> None:
    before, after = ((GUIDES / "trainer" / name).read_text().splitlines() for name in ("before.py", "after.py"))
    diff = "\n".join(difflib.unified_diff(before, after, "before.py", "after.py", lineterm=""))
    assert f"```diff\n{diff}\n```" in (GUIDES / "trainer.md").read_text(), f"The page should have:\n{diff}"
