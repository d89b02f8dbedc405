"""The manager's process, as the launcher sees it: forked by the zygote, and again whenever it dies.

It always serves the same socket, which the launcher keeps: while no manager is there, connections wait in the
socket's queue.
"""

from __future__ import annotations

import socket
from pathlib import Path

from varuna.launch.protocol import Channel, StartManager
from varuna.morph.runs import JOURNAL_NAME

LOG_NAME = "manager.log"
JOURNAL_NAMES = (JOURNAL_NAME, f"{JOURNAL_NAME}-wal", f"{JOURNAL_NAME}-shm")
"""The manager's files: what went wrong in it, and what it knows."""

_BACKLOG = 1024
_MANY = 5
_WITHIN_S = 60.0


class ManagerProcess:
    """One job's manager.

    Args:
        token: the job's, handed over in the environment.
        log_dir: gets its standard error (its traceback if it fails), and its journal; one of an earlier job
            there is removed.
        heartbeat_limit_s: a worker that is silent for so long is taken for dead.
    """

    def __init__(self, token: str, log_dir: Path, heartbeat_limit_s: float) -> None:
        for name in (LOG_NAME, *JOURNAL_NAMES):
            (log_dir / name).unlink(missing_ok=True)
        self.log_path = log_dir / LOG_NAME
        self.journal_path = log_dir / JOURNAL_NAME
        self._request = StartManager(
            environ={"VARUNA_TOKEN": token},
            arguments=["--journal", str(self.journal_path), "--heartbeat-limit", str(heartbeat_limit_s)],
        )
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._starts_s: list[float] = []

    def start(self, channel: Channel, now_s: float) -> None:
        """Have the zygote fork it."""
        self._starts_s = [*self._starts_s, now_s][-_MANY:]
        with self.log_path.open("ab") as log:
            channel.send(self._request, [self._listener.fileno(), log.fileno()])

    def may_start_again(self, now_s: float) -> bool:
        """Whether it has not died too often lately."""
        return len(self._starts_s) < _MANY or now_s - self._starts_s[0] > _WITHIN_S

    def close(self) -> None:
        """Serve no more: whoever connects is turned away at once. The process is left to the zygote."""
        self._listener.close()
