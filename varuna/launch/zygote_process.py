"""Starts the zygote, the interpreter that has torch imported and forks workers, and sees to its end."""

from __future__ import annotations

import signal
import socket
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path

import varuna
from varuna.launch.processes import kill_children, kill_group
from varuna.launch.protocol import Channel, Exited, Report, Started, decode_report

_CODE = "import sys; sys.path.append(sys.argv.pop(1)); from varuna.launch.zygote import main; main()"
_ONE_THREAD = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS")  # MKL follows OMP
_ONE_THREAD_ALONE = ("OPENBLAS_NUM_THREADS",)  # numpy would start its threads before the fork
_QUIET = {"TORCH_CPP_LOG_LEVEL": "ERROR"}  # a store that is gone is worth a page to torch, and told of anyway
_EXIT_TIMEOUT_S = 1.0


def start_zygote(environ: Mapping[str, str], num_workers: int) -> tuple[subprocess.Popen[bytes], Channel]:
    """Start it in a session of its own, so that the terminal's signals reach the launcher alone."""
    ours, its = socket.socketpair()
    package_root = str(Path(varuna.__file__).parent.parent)
    threads = _ONE_THREAD if num_workers > 1 else _ONE_THREAD_ALONE
    with its:
        process = subprocess.Popen(
            [sys.executable, "-P", "-c", _CODE, package_root, str(its.fileno())],
            env={**dict.fromkeys(threads, "1"), **_QUIET, **environ},
            pass_fds=(its.fileno(),),
            stdin=subprocess.DEVNULL,
            start_new_session=True,
        )
    return process, Channel(ours)


class ZygoteProcess:
    """A running zygote.

    Args:
        environ: what it and all that it forks find in their environment; the job's token is left out.
        num_workers: how many workers it is to fork at first.
    """

    def __init__(self, environ: Mapping[str, str], num_workers: int) -> None:
        kept = {name: value for name, value in environ.items() if name != "VARUNA_TOKEN"}
        self._process, self.channel = start_zygote(kept, num_workers)
        self._group_ids: dict[str, int] = {}  # of the living, by name

    def reports(self) -> list[Report]:
        """What it has told since the last call."""
        reports = [decode_report(line) for line in self.channel.receive_lines()]
        for report in reports:
            if isinstance(report, Started):
                self._group_ids[report.name] = report.pid
            elif isinstance(report, Exited):
                self._group_ids.pop(report.name, None)
        return reports

    def exit_code(self) -> int:
        """Wait for the end of one whose channel has ended; minus the signal if one ended it."""
        return self._process.wait()

    def close(self) -> None:
        """End it and all that it has forked. Idempotent."""
        self.channel.close()
        try:
            self._process.wait(_EXIT_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.returncode != 0:  # it did not come to end what it had forked
            for group_id in self._group_ids.values():
                kill_group(group_id, signal.SIGKILL)
            self._group_ids.clear()
            kill_children()
