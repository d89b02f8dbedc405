"""Notices for a launcher's machine: passed on to the manager, acknowledged when nobody needs the machine."""

from __future__ import annotations

from collections.abc import Mapping

from varuna.events import Event, Notice
from varuna.launch.agent import Agent
from varuna.launch.notice_watch import NoticeWatch
from varuna.launch.output import say
from varuna.morph.notices import NoticeWithdrawn, PreemptionNotice, Told


class MachineNotices:
    """Notices for this machine. Everything is called from the launcher's thread.

    Args:
        agent: passes them on to the manager; what is heard comes to it as an order.
        environ: see ``notices_detect.sources_from_env``.

    Raises:
        ConfigError: a variable that cannot be.
    """

    def __init__(self, agent: Agent, environ: Mapping[str, str]) -> None:
        self._agent = agent
        self._in_force: dict[tuple[str, str], PreemptionNotice] = {}
        self._acknowledged: set[tuple[str, str]] = set()
        self._watch = NoticeWatch(agent.machine, environ, tell=agent.put, report=_report)

    @property
    def is_going(self) -> bool:
        """This machine will go away: nothing is to start here."""
        return bool(self._in_force)

    def hear(self, told: Told, num_living: int) -> None:
        """One that was just told, with ``num_living`` workers here."""
        event = (told.source, told.event_id)
        if isinstance(told, PreemptionNotice):
            when = f"in {told.deadline_s:.0f} s" if told.deadline_s > 0 else "at any moment"
            say(f"{told.source} says that this machine goes away {when} ({told.kind.value}); its workers leave")
            self._in_force[event] = told
            self._agent.noticed(told)
            self.worker_left(num_living)
        elif isinstance(told, NoticeWithdrawn):
            say(f"{told.source} says that this machine does not go away after all")
            self._in_force.pop(event, None)
            self._agent.withdrawn(told)
        else:
            say(f"{told.source} says that this machine is more likely than before to go away")

    def worker_left(self, num_living: int) -> None:
        """Once no worker is left, nobody needs this machine any more, and the provider may have it.

        An event that other machines share is left alone: nothing is known of their workers here, and to
        acknowledge it would take those machines away, too.
        """
        if num_living:
            return
        for event, notice in self._in_force.items():
            if not notice.shared_with and event not in self._acknowledged:
                self._acknowledged.add(event)
                self._watch.acknowledge(*event)

    def close(self) -> None:
        """Listen no more."""
        self._watch.close()


def _report(event: Event) -> None:
    if isinstance(event, Notice):
        say(event.text)
