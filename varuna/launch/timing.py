"""Where the time goes between the command and the users' first line; shown with ``VARUNA_TIMING=1``."""

from __future__ import annotations


class StartTiming:
    """Collects moments (seconds on the monotonic clock) while a job starts.

    Args:
        launched_s: when the launcher began.
        num_workers: how many workers are to begin.
    """

    def __init__(self, launched_s: float, num_workers: int) -> None:
        self.import_s = 0.0
        self._launched_s = launched_s
        self._num_workers = num_workers
        self._ready_s = launched_s
        self._store_s = launched_s
        self._running_s: list[float] = []

    def zygote_ready(self, now_s: float, import_s: float) -> None:
        """The zygote has torch imported, which took it ``import_s``."""
        self._ready_s, self.import_s = now_s, import_s

    def store_ready(self, now_s: float) -> None:
        """The store listens."""
        self._store_s = now_s

    def worker_runs(self, at_s: float) -> None:
        """A worker begins with the user's code."""
        self._running_s.append(at_s)

    @property
    def is_complete(self) -> bool:
        """All workers have begun."""
        return len(self._running_s) == self._num_workers

    def summary(self) -> str:
        """One line, seconds."""
        last_s = max(self._running_s)
        return (
            f"{self._num_workers} workers run user code {last_s - self._launched_s:.2f} s after launch: "
            f"zygote {self._ready_s - self._launched_s:.2f} s (imports {self.import_s:.2f} s), "
            f"store {self._store_s - self._ready_s:.2f} s, workers {last_s - self._store_s:.2f} s."
        )
