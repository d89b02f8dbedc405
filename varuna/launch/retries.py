"""When what has failed is tried again: later each time. Pure."""

from __future__ import annotations

WAITS_S = (2.0, 5.0, 10.0, 30.0, 60.0)
"""Waits after the first failure, the second and so on; the last one is repeated."""


class Retries:
    """Failures by name; times on one clock."""

    def __init__(self) -> None:
        self._num_failed: dict[str, int] = {}
        self._next_s: dict[str, float] = {}

    def failed(self, name: str, now_s: float) -> float:
        """Once more; seconds until it may be tried again."""
        number = self._num_failed.get(name, 0)
        wait_s = WAITS_S[min(number, len(WAITS_S) - 1)]
        self._num_failed[name], self._next_s[name] = number + 1, now_s + wait_s
        return wait_s

    def waits(self, name: str, now_s: float) -> bool:
        """Whether it may not be tried yet."""
        return now_s < self._next_s.get(name, now_s)

    def waiting(self, now_s: float) -> list[str]:
        """All that may not be tried yet."""
        return [name for name in self._next_s if self.waits(name, now_s)]
