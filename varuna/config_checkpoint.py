"""What the user asked for of checkpoints: where they go, how often, how many stay, where a job begins."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from varuna.errors import ConfigError

DEFAULT_EVERY_S = 600.0

_SECONDS = re.compile(r"(\d+(?:\.\d+)?)\s*s")


@dataclass(frozen=True, kw_only=True)
class CheckpointConfig:
    """Checkpoints of a job; ``varuna.Checkpoints`` for users.

    Attributes:
        url: a directory that all machines share, or any URL that fsspec knows (``s3://bucket/name``).
        every_steps: save when the number of steps done is a multiple of this.
        every_s: save when so many seconds have passed since the last one. Neither: every ten minutes.
        keep: how many of the newest stay.
        resume: what a job begins from: the ``"newest"`` complete checkpoint if there is one, ``"never"`` one,
            or that of a step.
    """

    url: str
    every_steps: int | None = None
    every_s: float | None = None
    keep: int = 3
    resume: Literal["newest", "never"] | int = "newest"

    def __post_init__(self) -> None:
        if not isinstance(self.url, str) or not self.url:
            raise ConfigError(
                f"{self.url!r} is no place for checkpoints. Give a directory, or a URL such as s3://bucket/name."
            )
        if self.every_steps is not None and self.every_s is not None:
            raise ConfigError(
                f"Checkpoints every {self.every_steps} steps and every {self.every_s:g} s: give one of them."
            )
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"Checkpoints every {self.every_steps} steps: give 1 or more.")
        if self.every_s is not None and not 0 < self.every_s < float("inf"):
            raise ConfigError(f"Checkpoints every {self.every_s} s: give more than 0.")
        if self.keep < 1:
            raise ConfigError(f"Keeping the newest {self.keep} checkpoints keeps none. Keep at least 1.")
        is_step = isinstance(self.resume, int) and not isinstance(self.resume, bool) and self.resume >= 0
        if not is_step and self.resume not in ("newest", "never"):
            raise ConfigError(
                f"resume={self.resume!r} is none of newest, never or the step of a checkpoint, such as 1200."
            )

    @staticmethod
    def parse(url: str, *, every: str = "", keep: str = "", resume: str = "") -> CheckpointConfig:
        """From text, as flags and variables have it; empty leaves the default.

        Args:
            url: see the class.
            every: ``100`` for steps, ``300s`` for seconds.
            keep: a number.
            resume: ``newest``, ``never`` or a step.

        Raises:
            ConfigError: something cannot be read.
        """
        seconds = _SECONDS.fullmatch(every.strip())
        if every and seconds is None and not every.isdecimal():
            raise ConfigError(
                f"Checkpoints every {every!r} cannot be read. Write 100 for steps, or 300s for seconds."
            )
        if keep and not keep.isdecimal():
            raise ConfigError(f"{keep!r} is no number of checkpoints to keep. Write 3, say.")
        chosen: Literal["newest", "never"] | int
        if resume in ("", "newest"):
            chosen = "newest"
        elif resume == "never":
            chosen = "never"
        elif resume.isdecimal():
            chosen = int(resume)
        else:
            raise ConfigError(
                f"Resume from {resume!r} cannot be read. Write newest, never, or the step of a checkpoint."
            )
        return CheckpointConfig(
            url=url,
            every_steps=int(every) if every and seconds is None else None,
            every_s=None if seconds is None else float(seconds[1]),
            keep=int(keep) if keep else 3,
            resume=chosen,
        )

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> CheckpointConfig | None:
        """What ``to_env`` writes; None without ``VARUNA_CHECKPOINT``: no checkpoints.

        Raises:
            ConfigError: a value that cannot be.
        """
        url = environ.get("VARUNA_CHECKPOINT", "")
        if not url:
            return None
        return CheckpointConfig.parse(
            url,
            every=environ.get("VARUNA_CHECKPOINT_EVERY", ""),
            keep=environ.get("VARUNA_CHECKPOINT_KEEP", ""),
            resume=environ.get("VARUNA_RESUME", ""),
        )

    def to_env(self) -> dict[str, str]:
        """The variables from which ``from_env`` reads this value back."""
        every = ""
        if self.every_steps is not None:
            every = str(self.every_steps)
        elif self.every_s is not None:
            every = f"{self.every_s:g}s"
        return {
            "VARUNA_CHECKPOINT": self.url,
            "VARUNA_CHECKPOINT_EVERY": every,
            "VARUNA_CHECKPOINT_KEEP": str(self.keep),
            "VARUNA_RESUME": str(self.resume),
        }
