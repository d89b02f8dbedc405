"""A hosts file: the machines of a job, one a line, read again whenever it changes. Pure.

# machine           workers there; by default one per GPU, else one
gpu-1.example.org
me@10.0.0.7         workers=4
ssh://me@gpu-2:2222 workers=2
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from varuna.errors import ConfigError

_DESTINATION = re.compile(r"(ssh://)?[A-Za-z0-9_.@:\[\]%-]+")


@dataclass(frozen=True, kw_only=True)
class HostLine:
    """One machine.

    Attributes:
        destination: as the user writes it for ssh: ``host``, ``user@host``, ``ssh://user@host:port``.
        num_workers: to run there; None leaves it to the machine.
    """

    destination: str
    num_workers: int | None = None

    @property
    def name(self) -> str:
        """What the machine is called in messages: the destination without user and port."""
        name = self.destination.removeprefix("ssh://").rpartition("@")[2]
        return re.sub(r":\d+$", "", name) if self.destination.startswith("ssh://") else name


def read_hosts(text: str, where: str) -> tuple[HostLine, ...]:
    """The machines in a hosts file.

    Args:
        text: of the file.
        where: the file's name, for errors.

    Raises:
        ConfigError: a line cannot be read, or a machine is there twice.
    """
    lines: list[HostLine] = []
    for number, line in enumerate(text.splitlines(), 1):
        words = line.partition("#")[0].split()
        if not words:
            continue
        found = _read_line(words)
        if found is None:
            raise ConfigError(
                f"{where}, line {number}: {line.strip()!r} is no machine. Write: [user@]host [workers=N], or "
                f"ssh://[user@]host:port [workers=N]."
            )
        if found.name in [known.name for known in lines]:
            raise ConfigError(
                f"{where}, line {number}: {found.name} is there twice. Use workers=N for several."
            )
        lines.append(found)
    return tuple(lines)


def _read_line(words: Sequence[str]) -> HostLine | None:
    destination, *options = words
    if not _DESTINATION.fullmatch(destination) or destination.startswith("-"):
        return None
    num_workers = None
    for option in options:
        key, _, value = option.partition("=")
        if key not in ("workers", "slots") or not value.isdecimal() or not 1 <= int(value) <= 1024:
            return None
        num_workers = int(value)
    return HostLine(destination=destination, num_workers=num_workers)


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What follows from a new version of the file: where to start, and names of those that are to leave."""

    added: tuple[HostLine, ...]
    removed: tuple[str, ...]


def changes(running: Sequence[str], wanted: Sequence[HostLine]) -> Changes:
    """From machines, by name, on which the job runs or is about to, to those that the file has now."""
    names = [line.name for line in wanted]
    return Changes(
        added=tuple(line for line in wanted if line.name not in running),
        removed=tuple(name for name in running if name not in names),
    )
