"""SIGTERM (Kubernetes, Slurm, systemd) and SIGUSR1 (Slurm's ``--signal``) as notices. Pure.

Neither says how long the process has: Kubernetes kills after ``terminationGracePeriodSeconds`` (30 by default),
Slurm after what ``--signal=B:USR1@60`` named, or up to 60 s later. ``VARUNA_GRACE_S`` states it for both.
"""

from __future__ import annotations

import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass

from varuna.errors import ConfigError
from varuna.morph.notices import NoticeKind, PreemptionNotice

SOURCE = "signal"


@dataclass(frozen=True, kw_only=True)
class Grace:
    """Seconds between a signal and SIGKILL.

    Attributes:
        sigterm_s: after SIGTERM.
        usr1_s: after SIGUSR1.
    """

    sigterm_s: float = 30.0
    usr1_s: float = 60.0

    @staticmethod
    def from_env(environ: Mapping[str, str]) -> Grace:
        """``VARUNA_GRACE_S`` for both signals, else the usual graces.

        Raises:
            ConfigError: it is not a number of seconds.
        """
        text = environ.get("VARUNA_GRACE_S", "")
        if not text:
            return Grace()
        seconds = duration_from_env("VARUNA_GRACE_S", text)
        return Grace(sigterm_s=seconds, usr1_s=seconds)


def notice_of_signal(signum: int, *, machine: str, grace: Grace) -> PreemptionNotice | None:
    """What a signal to the agent announces; None for signals that announce nothing."""
    graces = {signal.SIGTERM: grace.sigterm_s, signal.SIGUSR1: grace.usr1_s}
    if signum not in graces:
        return None
    number = signal.Signals(signum)
    return PreemptionNotice(
        machine=machine,
        kind=NoticeKind.SIGNAL,
        deadline_s=graces[number],
        source=SOURCE,
        event_id=number.name,
    )


def duration_from_env(name: str, text: str) -> float:
    """Seconds from a variable.

    Raises:
        ConfigError: it is not a finite number of at least 0.
    """
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds >= 0):
        raise ConfigError(f"{name}={text!r} is not a number of seconds. Set it to 0 or more, e.g. {name}=30.")
    return seconds
