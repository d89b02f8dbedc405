"""What processes of a soak use, over its generations: threads, file descriptors, memory. Linux only (/proc)."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median_low

_PAGE_BYTES = os.sysconf("SC_PAGE_SIZE")
_MAX_MORE_BYTES = 24 << 20
_MAX_MORE_SHARE = 0.15
_FEWEST = 25
_FEWEST_ALIKE = 5


@dataclass(frozen=True, kw_only=True)
class Use:
    """What one process uses at one time.

    Attributes:
        generation: of the job then.
        num_members: of this generation; each has connections to others.
        num_threads, num_fds: of the process.
        resident_bytes: its memory; pages shared with other processes count in full.
    """

    generation: int
    num_members: int
    num_threads: int
    num_fds: int
    resident_bytes: int


@dataclass(kw_only=True)
class Uses:
    """What processes use, by name; a process that was started again has a name of its own each time."""

    by_name: dict[str, list[Use]] = field(default_factory=dict)

    def add(self, name: str, use: Use | None) -> None:
        """One more sample; None if the process is gone."""
        if use is not None:
            self.by_name.setdefault(name, []).append(use)

    def growth(self) -> list[str]:
        """What is not flat, in words: a process's last third against what was before.

        Threads and descriptors of a worker go with the number of members: what it usually has is compared among
        generations with as many. Of memory it is the most. The first samples, a tenth, are left out; processes
        with fewer than ``_FEWEST`` samples, and numbers of members with fewer than ``_FEWEST_ALIKE`` at first
        or later, are not judged.
        """
        found = []
        for name, uses in self.by_name.items():
            steady = uses[len(uses) // 10 :]
            if len(steady) < _FEWEST:
                continue
            early, late = steady[: -len(steady) // 3], steady[-len(steady) // 3 :]
            found += [f"{name}: {text}" for text in _grown_counts(early, late)]
            before, after = (max(use.resident_bytes for use in part) for part in (early, late))
            if after > before + max(_MAX_MORE_BYTES, _MAX_MORE_SHARE * before):
                found.append(f"{name}: {before >> 20} MiB at first, {after >> 20} MiB later")
        return found

    def table(self) -> str:
        """A row per process: how it was at first, in the middle, at the end."""
        rows = [("process", "generations", "threads", "descriptors", "MiB")]
        for name, uses in self.by_name.items():
            picked = _picked(uses)
            rows.append(
                (
                    name,
                    f"{uses[0].generation}..{uses[-1].generation}",
                    " ".join(str(use.num_threads) for use in picked),
                    " ".join(str(use.num_fds) for use in picked),
                    " ".join(str(use.resident_bytes >> 20) for use in picked),
                )
            )
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
        return "\n".join(line.rstrip() for line in lines)


def use_of(pid: int, generation: int, num_members: int) -> Use | None:
    """What a process uses now; None if it is gone."""
    directory = Path(f"/proc/{pid}")
    try:
        return Use(
            generation=generation,
            num_members=num_members,
            num_threads=len(os.listdir(directory / "task")),
            num_fds=len(os.listdir(directory / "fd")),
            resident_bytes=int((directory / "statm").read_text().split()[1]) * _PAGE_BYTES,
        )
    except (OSError, IndexError):
        return None


def processes_of(root_pid: int) -> dict[str, int]:
    """Names (as ``ps -o comm`` shows them) and ids of a process's descendants; of equal names, the newest."""
    parents: dict[int, int] = {}
    names: dict[int, str] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdecimal():
            try:
                head, _, tail = (entry / "stat").read_text().rpartition(")")
            except OSError:  # it has just ended
                continue
            names[int(entry.name)] = head.partition("(")[2]
            parents[int(entry.name)] = int(tail.split()[1]) if tail.split()[0] != "Z" else 0
    found = {root_pid}
    while more := {pid for pid, parent in parents.items() if parent in found} - found:
        found |= more
    return {names[pid]: pid for pid in sorted(found - {root_pid})}


def _picked(uses: Sequence[Use]) -> list[Use]:
    """Five of them, evenly."""
    last = len(uses) - 1
    return [uses[index] for index in sorted({round(last * part / 4) for part in range(5)})]


def _grown_counts(early: Sequence[Use], late: Sequence[Use]) -> list[str]:
    found = []
    for num_members in sorted({use.num_members for use in late}):
        alike = [[use for use in part if use.num_members == num_members] for part in (early, late)]
        if min(map(len, alike)) < _FEWEST_ALIKE:
            continue
        for what, number_of in (("threads", _threads), ("descriptors", _descriptors)):
            first, later = (median_low(map(number_of, part)) for part in alike)
            if later > first + max(1, first // 10):
                found.append(f"{first} {what} at first, {later} later ({num_members} members)")
    return found


def _threads(use: Use) -> int:
    return use.num_threads


def _descriptors(use: Use) -> int:
    return use.num_fds
