"""Whom the manager asks for machines, and how often; from flags and variables."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import urlsplit

from varuna.errors import ConfigError

COMMAND, URL = "VARUNA_SCALE_COMMAND", "VARUNA_SCALE_URL"
WORKERS, EVERY = "VARUNA_SCALE_WORKERS", "VARUNA_SCALE_S"
SCALE_VARIABLES = (COMMAND, URL, WORKERS, EVERY)


@dataclass(frozen=True, kw_only=True)
class ScaleConfig:
    """What happens when a job has fewer workers than it wants.

    Attributes:
        command: run by ``/bin/sh`` on the manager's machine, with a ``Call`` on standard input; empty for none.
        url: the same is posted there; empty for none. One of the two is given.
        workers: that the job wants; None: as many as it has had.
        every_s: seconds from one call to the next, at least.
    """

    command: str = ""
    url: str = ""
    workers: int | None = None
    every_s: float = 60.0

    def __post_init__(self) -> None:
        if self.command and self.url:
            raise ConfigError(
                f"Both a command and a URL to ask for machines: {self.command[:80]!r} and {host_of(self.url)}. "
                f"Give one of --scale-command and --scale-url."
            )
        if "\0" in self.command or (self.command and not self.command.strip()):
            raise ConfigError(f"--scale-command {self.command[:80]!r} is no command.")
        if self.url and not _is_url(self.url):
            raise ConfigError(
                f"--scale-url {self.url[:80]!r} is no URL to post to. Write http://HOST[:PORT]/PATH or https://..."
            )
        if self.workers is not None and self.workers < 1:
            raise ConfigError(f"A job that wants {self.workers} workers wants nothing. Give 1 or more.")
        if not (math.isfinite(self.every_s) and self.every_s >= 1):
            raise ConfigError(f"Asking for machines every {self.every_s:g} s: give 1 or more.")

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> ScaleConfig | None:
        """Read ``VARUNA_SCALE_COMMAND``, ``VARUNA_SCALE_URL``, ``VARUNA_SCALE_WORKERS`` and ``VARUNA_SCALE_S``.

        Returns:
            None if nobody is to be asked.

        Raises:
            ConfigError: a value that cannot be, or that needs somebody to ask.
        """
        command, url = environ.get(COMMAND, ""), environ.get(URL, "")
        workers, every = environ.get(WORKERS, ""), environ.get(EVERY, "")
        if not command and not url:
            if workers or every:
                name = WORKERS if workers else EVERY
                raise ConfigError(
                    f"{name}={environ[name]} says when to ask for machines, and nothing says whom. Add "
                    f"--scale-command CMD or --scale-url URL."
                )
            return None
        if workers and not (workers.isascii() and workers.isdecimal()):
            raise ConfigError(f"{WORKERS}={workers!r} is no number of workers. Write 8, say.")
        try:
            every_s = float(every or ScaleConfig.every_s)
        except ValueError:
            raise ConfigError(f"{EVERY}={every!r} is no number of seconds. Write 60, say.") from None
        return ScaleConfig(command=command, url=url, workers=int(workers) if workers else None, every_s=every_s)


def host_of(url: str) -> str:
    """Where a URL leads; the rest of it may be secret."""
    parts = urlsplit(url)
    return f"{parts.scheme}://{parts.hostname or ''}"


def _is_url(text: str) -> bool:
    try:
        parts = urlsplit(text)
        port = parts.port
    except ValueError:
        return False
    is_plain = text.isascii() and text.isprintable() and " " not in text
    return is_plain and parts.scheme in ("http", "https") and bool(parts.hostname) and port != 0
