"""Medians of interleaved repeats, tables as text, and fragments for LOG.md."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import statistics
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path


def interleaved(repeats: int, variants: Mapping[str, Callable[[], float]]) -> dict[str, list[float]]:
    """Run every variant once per repeat, in turn, so that a slow minute of the machine hits all alike."""
    figures: dict[str, list[float]] = {name: [] for name in variants}
    for repeat in range(repeats):
        names = list(variants) if repeat % 2 == 0 else list(reversed(variants))
        for name in names:
            figures[name].append(variants[name]())
    return figures


def median_ratio(over: Sequence[float], under: Sequence[float]) -> float:
    """Median of the ratios of neighbouring measurements, which a drifting machine disturbs least."""
    return statistics.median(a / b for a, b in zip(over, under, strict=True))


def table(header: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """A Markdown table with aligned columns; floats to three significant decimals."""
    cells = [list(header), *([_text(cell) for cell in row] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(header))]
    lines = [
        "| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |"
        for row in cells
    ]
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


def _text(cell: object) -> str:
    return f"{cell:.3f}" if isinstance(cell, float) else str(cell)


def arguments(description: str, **defaults: int) -> argparse.Namespace:
    """The command line that every benchmark shares, plus one whole-number option per keyword."""
    return parser(description, **defaults).parse_args()


def parser(description: str, **defaults: int) -> argparse.ArgumentParser:
    """Of that command line, for a benchmark that has more options."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--log", type=Path, help="append the table to this Markdown file")
    for name, value in defaults.items():
        made.add_argument(f"--{name.replace('_', '-')}", type=int, default=value, help=f"default {value}")
    return made


def report(title: str, text: str, log: Path | None = None, notes: str = "") -> None:
    """Print a result with the command that made it; append it to ``log`` if given."""
    module = getattr(sys.modules["__main__"].__spec__, "name", sys.argv[0])
    command = "python -m " + " ".join([module, *map(shlex.quote, sys.argv[1:])])
    when = datetime.now(UTC).strftime("%Y-%m-%d")
    lines = [f"### {title}", "", f"{when}, commit {_commit()}, {_machine()}: `{command}`", "", text]
    if notes:
        lines += ["", notes]
    fragment = "\n".join(lines) + "\n"
    print(fragment, flush=True)
    if log is not None:
        with log.open("a") as file:
            file.write("\n" + fragment)


def _commit() -> str:
    done = subprocess.run(["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False)
    return done.stdout.strip() or "unknown"


def _machine() -> str:
    return f"{len(os.sched_getaffinity(0))} cores, {platform.machine()}, python {platform.python_version()}"
