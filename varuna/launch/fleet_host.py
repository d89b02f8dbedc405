"""The manager's host that also has agents started elsewhere and told to leave: the base of all that do so."""

from __future__ import annotations

import signal
from abc import abstractmethod
from collections.abc import Mapping
from typing import ClassVar

from varuna.launch.host import ManagerHost, ManagerSettings
from varuna.launch.output import say
from varuna.launch.retries import Retries
from varuna.launch.signals import SignalInbox

END_S = 10.0
"""When the job is over, or is stopped, agents get so long to end."""


class FleetHost(ManagerHost):
    """A manager and machines.

    Attributes:
        retries: of machines that were not reached, or whose agents failed.
    """

    look_s: ClassVar[float]
    """How often it looks at its agents."""

    places: ClassVar[str]
    """What people call the machines."""

    def __init__(
        self, settings: ManagerSettings, token: str, environ: Mapping[str, str], inbox: SignalInbox
    ) -> None:
        super().__init__(settings, token, environ, inbox)
        self.retries = Retries()
        self._stop_s: float | None = None

    def on_time(self, now_s: float) -> float:
        """See ``ManagerHost``."""
        self.look_at_agents(now_s)
        if self._stop_s is not None:
            if not self.has_machines or now_s >= self._stop_s:
                self.end(1, now_s)
        elif self.exit_code is None:
            self.look_for_machines(now_s)
        return self.look_s

    def signalled(self, signum: signal.Signals, now_s: float) -> None:
        """The first stops the job in good order, a second one does not wait."""
        if self._stop_s is not None:
            self.end(128 + signum, now_s)
            return
        say(f"{signum.name}: the job is stopped on all {self.places}")
        self.end(128 + signum, now_s + END_S)
        self._stop_s = now_s + END_S
        self.stop_agents(now_s)

    @property
    @abstractmethod
    def has_machines(self) -> bool:
        """Whether any agent may still be at work."""

    @abstractmethod
    def look_at_agents(self, now_s: float) -> None:
        """What they print, and which have ended."""

    @abstractmethod
    def look_for_machines(self, now_s: float) -> None:
        """Which have come, and which have to go."""

    @abstractmethod
    def stop_agents(self, now_s: float) -> None:
        """Tell all to end."""
