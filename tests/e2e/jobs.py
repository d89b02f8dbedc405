"""Starts jobs in a warm process (``tests.e2e.warm``) and reads how they ended."""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.launch.jobs import wait_until

REPOSITORY = Path(__file__).parents[2]
SCRIPTS = Path(__file__).parent / "scripts"


@dataclass(frozen=True, kw_only=True)
class Ended:
    """A job that has ended.

    Attributes:
        codes: exit code of the command, or of each worker that ran alone.
        seconds: from the moment that the script noted in the file ``fault`` to the last end; nan if it did not.
        stdout, stderr: of the command; empty for workers alone.
        outputs: what each worker wrote to standard error.
        left: processes that outlived it.
    """

    codes: list[int]
    seconds: float
    stdout: str
    stderr: str
    outputs: dict[int, str]
    left: list[str]

    @property
    def told(self) -> str:
        """Lines of the report."""
        return "\n".join(line for line in self.stderr.splitlines() if line.startswith("varuna: "))


class Job:
    """One that runs."""

    def __init__(self, warm: Warm, directory: Path, pid: int) -> None:
        self._warm, self._directory, self.pid = warm, directory, pid

    def wait_for(self, name: str, timeout_s: float = 40) -> None:
        """Until the script has made this file."""
        wait_until((self._directory / name).exists, timeout_s, f"the script makes {name}")

    def interrupt(self) -> None:
        """Ctrl-C, of which the directory keeps the moment."""
        (self._directory / "fault").write_text(str(time.monotonic()))
        os.kill(self.pid, signal.SIGINT)

    def wait(self) -> Ended:
        """How it ended."""
        ended = self._warm.read()
        path = self._directory / "fault"
        logs = [*self._directory.glob("logs/worker-*.log"), *self._directory.glob("worker-*.err")]
        return Ended(
            codes=ended["codes"],
            seconds=max(ended["ends_s"]) - float(path.read_text()) if path.exists() else math.nan,
            stdout=_text(self._directory / "command.out"),
            stderr=_text(self._directory / "command.err"),
            outputs={int(re.findall(r"\d+", log.name)[0]): log.read_text() for log in logs},
            left=ended["left"],
        )


class Warm:
    """The warm process. One job at a time."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self._process = process

    def run(
        self,
        directory: Path,
        script: str,
        *arguments: str,
        workers: int = 4,
        stages: int = 2,
        micro_batch_size: int = 1,
        cache_dir: Path | None = None,
        morphs: bool = False,
        environ: Mapping[str, str] | None = None,
    ) -> Job:
        """`varuna run` of a script of ``scripts/``."""
        flags = ["--workers", str(workers), "--stages", str(stages)]
        flags += ["--micro-batch-size", str(micro_batch_size)]
        flags.append("--morph" if morphs else "--no-morph")
        where = ["--log-dir", str(directory / "logs")]
        variables = {**_cache(cache_dir), **(environ or {})}
        return self._start(directory, "varuna", ["run", *flags, *where, _script(script), *arguments], variables)

    def command(self, directory: Path, arguments: Sequence[str], environ: Mapping[str, str]) -> Job:
        """Any `varuna` command, with these variables more."""
        return self._start(directory, "varuna", list(arguments), environ)

    def run_alone(self, directory: Path, script: str, *arguments: str, cache_dir: Path | None = None) -> Job:
        """The same without a launcher: nobody ends a worker that hangs."""
        environ = {"VARUNA_STAGES": "2", "VARUNA_MICRO_BATCH_SIZE": "1", **_cache(cache_dir)}
        return self._start(directory, "alone", [_script(script), *arguments], environ)

    def start(
        self,
        directory: Path,
        name: str,
        arguments: Sequence[str],
        environ: Mapping[str, str],
        *,
        namespace: str = "",
    ) -> int:
        """A `varuna` command beside others; its process id. Its output is in ``name.out`` and ``name.err``."""
        return int(
            self.ask(
                mode="start",
                name=name,
                arguments=list(arguments),
                cwd=str(directory),
                environ=dict(environ),
                namespace=namespace,
            )["pid"]
        )

    def join(self, pid: int) -> int:
        """The exit code of one that was started so."""
        (code,) = self.ask(mode="join", pid=pid)["codes"]
        return int(code)

    def left(self) -> list[str]:
        """Processes that have outlived the commands that were started so; they are ended."""
        return list(self.ask(mode="left")["left"])

    def ask(self, **request: Any) -> dict[str, Any]:
        """The answer to a request."""
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return self.read()

    def read(self) -> dict[str, Any]:
        """The next answer."""
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        assert line, f"the warm process ended with {self._process.wait()}"
        return dict(json.loads(line))

    def _start(self, directory: Path, mode: str, arguments: list[str], environ: Mapping[str, str]) -> Job:
        request = {
            "mode": mode,
            "arguments": arguments,
            "cwd": str(directory),
            "num_workers": 4,
            "environ": dict(environ),
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return Job(self, directory, self.read()["pid"])


@contextlib.contextmanager
def warm(cache_dir: Path) -> Iterator[Warm]:
    """A warm process for as long as the block runs."""
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "VARUNA_CACHE_DIR": str(cache_dir)}
    process = subprocess.Popen(
        [sys.executable, "-m", "tests.e2e.warm"],
        cwd=REPOSITORY,
        env=environ,
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        with process:
            served = Warm(process)
            served.read()
            yield served
    finally:
        process.kill()
        process.wait()


def _script(name: str) -> str:
    return str(SCRIPTS / name)


def _cache(directory: Path | None) -> dict[str, str]:
    return {} if directory is None else {"VARUNA_CACHE_DIR": str(directory)}


def _text(path: Path) -> str:
    return path.read_text() if path.exists() else ""
