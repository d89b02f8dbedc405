"""Starts real `varuna` commands on small scripts, and finds every process that belongs to one."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil

import varuna

MARK = "VARUNA_TEST_MARK"
PACKAGE_ROOT = str(Path(varuna.__file__).parent.parent)
POLL_S = 0.02


@dataclass(frozen=True, kw_only=True)
class Finished:
    """A command that has ended."""

    code: int
    stdout: str
    stderr: str


class Command:
    """A `varuna` command that runs; its processes are known by a variable in their environment."""

    def __init__(
        self, arguments: list[str], cwd: Path, environ: dict[str, str], stderr: int | None = None
    ) -> None:
        self.mark = uuid.uuid4().hex
        clean = {name: value for name, value in os.environ.items() if not name.startswith("OMP_")}
        self.process = subprocess.Popen(
            [sys.executable, "-m", "varuna", *arguments],
            cwd=cwd,
            env={**clean, "PYTHONPATH": PACKAGE_ROOT, **environ, MARK: self.mark},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE if stderr is None else stderr,
            start_new_session=True,
            text=True,
        )

    def wait(self, timeout_s: float = 60) -> Finished:
        stdout, stderr = self.process.communicate(timeout=timeout_s)
        return Finished(code=self.process.returncode, stdout=stdout, stderr=stderr or "")

    def signal(self, signum: int) -> None:
        self.process.send_signal(signum)

    def signal_group(self, signum: int) -> None:
        """As a terminal does on Ctrl-C."""
        os.killpg(self.process.pid, signum)

    def processes(self) -> list[psutil.Process]:
        """Every process that this command started, itself and zombies of known parents included."""
        found = {}
        for process in psutil.process_iter():
            try:
                if process.environ().get(MARK) == self.mark:
                    found[process.pid] = process
                    found.update({child.pid: child for child in process.children(recursive=True)})
            except (psutil.NoSuchProcess, psutil.AccessDenied, psutil.ZombieProcess):
                continue
        return list(found.values())

    def kill_all(self) -> None:
        for process in self.processes():
            if process.is_running():
                process.send_signal(signal.SIGKILL)
        self.process.wait()
        for stream in (self.process.stdout, self.process.stderr):
            if stream is not None:
                stream.close()


def write_script(directory: Path, text: str, name: str = "train.py") -> Path:
    path = directory / name
    path.write_text(textwrap.dedent(text))
    return path


def wait_until(condition: Callable[[], object], timeout_s: float = 120, what: str = "") -> float:
    """Poll until the condition holds; returns how long that took."""
    started = time.monotonic()
    while not condition():
        waited = time.monotonic() - started
        assert waited < timeout_s, f"not within {timeout_s} s: {what}"
        time.sleep(POLL_S)
    return time.monotonic() - started
