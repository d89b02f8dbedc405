"""Fail if a Python file has more than 500 lines: one idea per file. Run by ``make check``."""

from __future__ import annotations

import sys
from pathlib import Path

LIMIT = 500


def main() -> int:
    """Print every file over the limit; return the exit code."""
    root = Path(__file__).resolve().parent.parent
    too_long = [
        (path, lines)
        for folder in ("varuna", "tests", "benchmarks", "examples", "scripts")
        for path in sorted((root / folder).rglob("*.py"))
        if (lines := len(path.read_text().splitlines())) > LIMIT
    ]
    for path, lines in too_long:
        print(f"{path.relative_to(root)}: {lines} lines; split it by idea (limit {LIMIT})")
    return 1 if too_long else 0


if __name__ == "__main__":
    sys.exit(main())
