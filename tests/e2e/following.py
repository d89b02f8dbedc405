"""What a run's manager tells, to its last word: the run may be over before a test has asked for it."""

from __future__ import annotations

import threading

from tests.launch.jobs import wait_until
from varuna.morph.client import RunClient
from varuna.morph.views import LoggedEvent


class Following:
    """Events of a run, as they come; those of a manager that is started again follow those of the one before.

    Attributes:
        seen: all that have come.
    """

    def __init__(self, client: RunClient) -> None:
        self.seen: list[LoggedEvent] = []
        self._num_passed = 0
        self._client = client
        self._thread = threading.Thread(target=self._follow, daemon=True)
        self._thread.start()

    def next(self, kind: str, text: str, within_s: float) -> LoggedEvent | None:
        """The next one of a kind with a text in it; None if the run ends before it comes."""
        found: list[LoggedEvent] = []

        def look() -> bool:
            is_over = not self._thread.is_alive()
            while self._num_passed < len(self.seen) and not found:
                event = self.seen[self._num_passed]
                self._num_passed += 1
                if event.kind == kind and text in event.text:
                    found.append(event)
            return bool(found) or is_over

        wait_until(look, within_s, f"an event {kind!r} with {text!r}")
        return found[0] if found else None

    def _follow(self) -> None:
        self.seen.extend(self._client.events(follow=True))
