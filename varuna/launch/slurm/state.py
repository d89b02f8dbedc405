"""What the tasks of a job leave for one another in its directory."""

from __future__ import annotations

from pathlib import Path

import msgspec

from varuna.errors import ConfigError
from varuna.launch.host import RECORD_NAME
from varuna.launch.manager import JOURNAL_NAMES, LOG_NAME
from varuna.morph.runs import JOURNAL_NAME

_TASKS_NAME = "tasks"
_MANAGER_TASK_NAME = "manager-task"
_DONE_NAME = "done"


class _Founding(msgspec.Struct):
    """What is needed of the manager's record."""

    min_workers: int


def note_task(directory: Path, job_id: str) -> None:
    """A task begins: the file's time is when."""
    (directory / _TASKS_NAME).mkdir(exist_ok=True)
    (directory / _TASKS_NAME / job_id).write_text("")


def tasks_started_s(directory: Path) -> dict[str, float]:
    """When each task was started last, by job id: Unix time of the file server."""
    return {path.name: path.stat().st_mtime for path in (directory / _TASKS_NAME).glob("*")}


def note_manager_task(directory: Path, job_id: str) -> None:
    """This task runs the manager."""
    (directory / _MANAGER_TASK_NAME).write_text(job_id)


def manager_task(directory: Path) -> str:
    """The Slurm job id of the task that runs the manager; empty if none ever has."""
    path = directory / _MANAGER_TASK_NAME
    return path.read_text() if path.exists() else ""


def note_done(directory: Path) -> None:
    """The job has ended well."""
    (directory / _DONE_NAME).write_text("")


def is_done(directory: Path) -> bool:
    """Whether it has."""
    return (directory / _DONE_NAME).exists()


def journal_s(state: Path) -> float | None:
    """When the manager has last written something down, as ``tasks_started_s``; None if there was none."""
    times_s = [path.stat().st_mtime for path in state.glob(f"{JOURNAL_NAME}*")]
    return max(times_s, default=None)


def known_min_workers(state: Path) -> int:
    """With how many workers the job was to begin, which must not change; 0 if that was never said.

    Raises:
        ConfigError: the manager's record is damaged.
    """
    path = state / RECORD_NAME
    if not path.exists():
        return 0
    try:
        return msgspec.json.decode(path.read_bytes(), type=_Founding).min_workers
    except msgspec.DecodeError as error:
        raise ConfigError(f"{path} cannot be read: {error}. Begin a new job, in another --log-dir.") from error


def set_aside(state: Path) -> None:
    """What a manager knew goes into a folder ``before-N``; the token stays."""
    number = 1
    while (state / f"before-{number}").exists():
        number += 1
    aside = state / f"before-{number}"
    aside.mkdir(mode=0o700)
    for name in (RECORD_NAME, LOG_NAME, *JOURNAL_NAMES):
        if (state / name).exists():
            (state / name).rename(aside / name)
