"""Where a run's manager is: one small file per run, readable by its owner alone, so that commands find it.

The file is written by the launcher, ``runs/<run id>.json`` in the cache directory, and removed when the run
ends. One that a killed launcher has left is recognised by its process and removed by whoever looks.
"""

from __future__ import annotations

import contextlib
import os
import socket
from pathlib import Path

import msgspec
from msgspec import Struct, field

from varuna.errors import ConfigError

JOURNAL_NAME = "journal.sqlite"
"""The manager's journal, in the folder of a run's logs."""

INCOMPLETE_NAME = f"incomplete-{JOURNAL_NAME}"
"""A journal that could not be written any more, from then on."""


class RunInfo(Struct, frozen=True, kw_only=True):
    """One run.

    Attributes:
        run_id: its name.
        url: of its manager.
        token: the job's secret.
        pid: of its launcher.
        host: of its launcher, by its own name.
        started_s: Unix time of its start.
        journal: path of its manager's journal; empty if that is on another machine.
    """

    run_id: str
    url: str
    token: str
    pid: int
    started_s: float
    host: str = field(default_factory=socket.gethostname)
    journal: str = ""

    def __repr__(self) -> str:
        """Without the token."""
        return f"RunInfo(run_id={self.run_id!r}, url={self.url!r}, pid={self.pid})"


def write_run(info: RunInfo, cache_dir: Path) -> Path:
    """Announce a run; returns the file, which the caller removes at its end."""
    directory = cache_dir / "runs"
    directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    path = directory / f"{info.run_id}.json"
    temporary = path.with_suffix(f".{os.getpid()}.part")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.encode(info))
    temporary.replace(path)
    return path


def find_run(cache_dir: Path, run_id: str = "") -> RunInfo:
    """The run of this name, or the one that was started last.

    Raises:
        ConfigError: there is none.
    """
    runs = living_runs(cache_dir)
    chosen = [run for run in runs if run_id in ("", run.run_id)]
    if chosen:
        return chosen[-1]
    known = ", ".join(run.run_id for run in runs) or "none"
    what = f"No run {run_id!r}" if run_id else "No run"
    raise ConfigError(
        f"{what} with a manager on this machine; running: {known}. A run has one if it was started by `varuna "
        f"manager`, or by `varuna run` with several workers or machines, by this user, with the same cache "
        f"directory ({cache_dir}), and while that command lives. Of another machine's, say --manager URL."
    )


def living_runs(cache_dir: Path) -> list[RunInfo]:
    """Runs whose launchers live on this host, in the order in which they were started.

    The folder may be one that other hosts share; theirs are left alone.
    """
    runs, here = [], socket.gethostname()
    for path in (cache_dir / "runs").glob("*.json"):
        with contextlib.suppress(FileNotFoundError):  # it ended just now
            try:
                run = msgspec.json.decode(path.read_bytes(), type=RunInfo)
            except msgspec.DecodeError as error:
                raise ConfigError(f"{path} cannot be read: {error}. Remove it.") from error
            if run.host != here:
                continue
            if _is_alive(run.pid):
                runs.append(run)
            else:
                path.unlink()
    return sorted(runs, key=lambda run: run.started_s)


def _is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:  # it lives, as somebody else's
        return True
    return True
