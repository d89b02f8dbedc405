"""The manager's process, as the launcher sees it: forked by the zygote, and again whenever it dies or freezes.

It always serves the same socket, which the launcher keeps: while no manager is there, connections wait in the
socket's queue.
"""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from varuna.config import MorphConfig
from varuna.launch.protocol import Channel, StartManager
from varuna.morph.heartbeat import Heartbeats
from varuna.morph.runs import INCOMPLETE_NAME, JOURNAL_NAME

MANAGER_NAME = "manager"
LOG_NAME = "manager.log"
JOURNAL_NAMES = tuple(
    f"{name}{ending}" for name in (JOURNAL_NAME, INCOMPLETE_NAME) for ending in ("", "-wal", "-shm")
)
"""The manager's files: what went wrong in it, and what it knows."""

LOOPBACK = "127.0.0.1"
ANY_ADDRESS = "0.0.0.0"
BACKLOG = 1024
"""Connections that wait while no manager is there."""

_MANY = 5
_WITHIN_S = 60.0
_START_LIMIT_S = 60.0  # it imports what makes plans


@dataclass(frozen=True, kw_only=True)
class ManyMachines:
    """How a manager serves a job of many machines.

    Attributes:
        listener: what it serves on.
        run_id, store_port: what it tells agents; see ``messages.Welcome``.
        min_workers, settle_s: see ``Policy``.
    """

    listener: socket.socket
    run_id: str
    store_port: int
    min_workers: int
    settle_s: float


class ManagerProcess:
    """One job's manager.

    Args:
        token: the job's, handed over in the environment.
        log_dir: gets its standard error (its traceback if it fails), and its journal; one of an earlier job
            there is removed, unless the job has many machines.
        config: what the user set.
        many: how it serves many machines; None for one.
        run_id: name of the run.
    """

    def __init__(
        self,
        token: str,
        log_dir: Path,
        config: MorphConfig,
        many: ManyMachines | None = None,
        *,
        run_id: str = "",
    ) -> None:
        if many is None:
            for name in (LOG_NAME, *JOURNAL_NAMES):
                (log_dir / name).unlink(missing_ok=True)
        self.log_path = log_dir / LOG_NAME
        self.journal_path = log_dir / JOURNAL_NAME
        limits = ["--heartbeat-limit", str(config.heartbeat_limit_s), "--rest", str(config.rest_s)]
        chosen = {"--replace-lost": config.replace_lost, "--ignore-slow": not config.finds_slow}
        named = ["--run-name", run_id] if run_id else []
        flags = [*limits, *named, *(flag for flag, is_set in chosen.items() if is_set), *_arguments(many)]
        self._request = StartManager(
            environ={"VARUNA_TOKEN": token}, arguments=["--journal", str(self.journal_path), *flags]
        )
        self._watch = Heartbeats(config.manager_limit_s)
        self._listener = many.listener if many else socket.create_server((LOOPBACK, 0), backlog=BACKLOG)
        host, port = self._listener.getsockname()[:2]
        self.url = f"http://{LOOPBACK if host == ANY_ADDRESS else host}:{port}"
        self._starts_s: list[float] = []
        self._num_starts = 0
        self._num_heard = 0

    @property
    def lost_journal(self) -> Path | None:
        """Its journal, if that could not be written any more: it cannot be started again then."""
        aside = self.journal_path.with_name(INCOMPLETE_NAME)
        return aside if aside.exists() else None

    def start(self, channel: Channel, now_s: float) -> None:
        """Have the zygote fork it."""
        self._starts_s = [*self._starts_s, now_s][-_MANY:]
        self._num_starts += 1
        limit_s = max(self._watch.limit_s, _START_LIMIT_S)
        self._watch.expect(MANAGER_NAME, str(self._num_starts), now_s, limit_s=limit_s)
        with self.log_path.open("ab") as log:
            channel.send(self._request, [self._listener.fileno(), log.fileno()])

    def may_start_again(self, now_s: float) -> bool:
        """Whether it has not died too often lately."""
        return len(self._starts_s) < _MANY or now_s - self._starts_s[0] > _WITHIN_S

    def silent_s(self, num_heard: int, now_s: float) -> float:
        """Seconds for which it has not been heard, if it has to be killed for that; else 0. It is told once.

        Args:
            num_heard: how many signs of life have come from it so far.
            now_s: on the monotonic clock; call this several times in the limit.
        """
        if num_heard != self._num_heard:
            self._num_heard = num_heard
            self._watch.beat(MANAGER_NAME, str(self._num_starts), now_s)
        for suspect in self._watch.suspects(now_s):
            self._watch.fence(MANAGER_NAME, suspect.incarnation, suspect.reason)
            return suspect.silent_s
        return 0.0

    def close(self) -> None:
        """Serve no more: whoever connects is turned away at once. The process is left to the zygote."""
        self._listener.close()
        self._watch.fence(MANAGER_NAME, str(self._num_starts), "nobody is expected any more")


def _arguments(many: ManyMachines | None) -> list[str]:
    if many is None:
        return []
    founding = ["--min-workers", str(many.min_workers), "--settle", str(many.settle_s)]
    return ["--run-id", many.run_id, "--store-port", str(many.store_port), *founding]
