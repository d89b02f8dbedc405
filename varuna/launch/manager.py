"""The manager's process: started beside the job, and again whenever it dies, on the same socket.

While no manager is there, connections to it wait in the socket's queue. A pair of sockets, one end in each
process, tells either that the other is gone.
"""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import varuna

LOG_NAME = "manager.log"
JOURNAL_NAMES = ("journal.sqlite", "journal.sqlite-wal", "journal.sqlite-shm")
"""The manager's files: what went wrong in it, and what it knows."""

_BACKLOG = 1024
_EXIT_TIMEOUT_S = 2.0
_MANY = 5
_WITHIN_S = 60.0
_CODE = "import sys; sys.path.append(sys.argv.pop(1)); from varuna.morph.__main__ import main; sys.exit(main())"


class ManagerProcess:
    """One job's manager.

    Args:
        token: the job's, handed over in the environment.
        environ: what else the manager finds there.
        log_dir: gets its standard error (its traceback if it fails), and its journal; one of an earlier job
            there is removed.
        arguments: more of its command line.
    """

    def __init__(
        self, token: str, environ: Mapping[str, str], log_dir: Path, arguments: tuple[str, ...] = ()
    ) -> None:
        self.log_path = log_dir / LOG_NAME
        self._journal = log_dir / JOURNAL_NAMES[0]
        for name in (LOG_NAME, *JOURNAL_NAMES):
            (log_dir / name).unlink(missing_ok=True)
        self._environ = {**environ, "VARUNA_TOKEN": token}
        self._arguments = arguments
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=_BACKLOG)
        self.url = f"http://127.0.0.1:{self._listener.getsockname()[1]}"
        self._starts_s: list[float] = []
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: socket.socket | None = None

    @property
    def pid(self) -> int:
        """Of the process at work."""
        assert self._process is not None
        return self._process.pid

    def fileno(self) -> int:
        """What becomes readable when it is gone; another one after each ``start``."""
        assert self._lifeline is not None
        return self._lifeline.fileno()

    def start(self, now_s: float) -> None:
        """Start it, in a session of its own so that the terminal's signals do not reach it."""
        self._starts_s = [*self._starts_s, now_s][-_MANY:]
        self._lifeline, its = socket.socketpair()
        passed = (self._listener.fileno(), its.fileno())
        root = str(Path(varuna.__file__).parent.parent)
        flags = ["--listen-fd", str(passed[0]), "--lifeline-fd", str(passed[1])]
        flags += ["--journal", str(self._journal), *self._arguments]
        with its, self.log_path.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", _CODE, root, *flags],
                env=self._environ,
                pass_fds=passed,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    @property
    def is_gone(self) -> bool:
        """The process has ended."""
        return self._process is not None and self._process.poll() is not None

    def reap(self) -> str:
        """How the process that is gone has ended."""
        assert self._process is not None
        assert self._lifeline is not None
        self._lifeline.close()
        code = self._process.wait()
        return f"by signal {-code}" if code < 0 else f"with code {code}"

    def may_start_again(self, now_s: float) -> bool:
        """Whether it has not died too often lately."""
        return len(self._starts_s) < _MANY or now_s - self._starts_s[0] > _WITHIN_S

    def close(self) -> None:
        """End it in good order, or else kill it. Idempotent."""
        self._listener.close()
        if self._process is None:
            return
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGTERM)
            try:
                self._process.wait(_EXIT_TIMEOUT_S)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._lifeline is not None:
            self._lifeline.close()
