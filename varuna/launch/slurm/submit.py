"""Hands a job, or more machines for one, to sbatch."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path

import msgspec

from varuna.errors import ConfigError
from varuna.launch.host import TOKEN_NAME
from varuna.launch.slurm.job import JOB_NAME, STATE_NAME, SlurmJob
from varuna.launch.token import VARIABLE, keep_token


def write_job(job: SlurmJob, directory: Path) -> None:
    """Keep what was asked for, and make the job's token: tasks may begin in any order.

    Both are readable by their owner alone; variables may be secret.

    Raises:
        ConfigError: the directory cannot be used, or belongs to a job already.
    """
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(directory / JOB_NAME, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        raise ConfigError(
            f"{directory} belongs to a job already. `varuna slurm add {directory}` gives it more machines; for "
            f"a new job, give another --log-dir."
        ) from None
    except OSError as error:
        raise ConfigError(f"Nothing can be written to {directory}: {error}. Give another --log-dir.") from error
    with os.fdopen(descriptor, "wb") as file:
        file.write(msgspec.json.format(msgspec.json.encode(job), indent=2))
    (directory / STATE_NAME).mkdir(mode=0o700)
    keep_token({}, directory / STATE_NAME / TOKEN_NAME)


def forget_job(directory: Path) -> None:
    """Take back what was written for a job that Slurm did not want; other files there stay."""
    for path in (directory / STATE_NAME / TOKEN_NAME, directory / JOB_NAME, *directory.glob("job*.sh")):
        path.unlink(missing_ok=True)
    (directory / STATE_NAME).rmdir()
    if not any(directory.iterdir()):
        directory.rmdir()


def read_job(directory: Path) -> SlurmJob:
    """What was asked for.

    Raises:
        ConfigError: there is no job in the directory.
    """
    path = directory / JOB_NAME
    try:
        return msgspec.json.decode(path.read_bytes(), type=SlurmJob)
    except (OSError, msgspec.DecodeError) as error:
        raise ConfigError(
            f"There is no job in {directory}: {error}. Give the directory that `varuna run --slurm` has named."
        ) from error


def write_script(directory: Path, stem: str, script: str) -> Path:
    """Keep a script, under a name that is not taken."""
    number = 1
    path = directory / f"{stem}.sh"
    while path.exists():
        number += 1
        path = directory / f"{stem}-{number}.sh"
    path.write_text(script, encoding="utf-8")
    return path


def submit(sbatch: Sequence[str], script: Path, environ: Mapping[str, str]) -> str:
    """Have Slurm run a script; returns the id of the job.

    Raises:
        ConfigError: it does not want to.
    """
    command = [*sbatch, "--parsable", str(script)]
    clean = {name: value for name, value in environ.items() if name != VARIABLE}
    try:
        done = subprocess.run(
            command, env=clean, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False
        )
    except OSError as error:
        raise ConfigError(
            f"{sbatch[0]} cannot be run: {error}. Do this where jobs are submitted, or --print the script."
        ) from error
    if done.returncode:
        said = (done.stderr or done.stdout).strip() or f"exit code {done.returncode}"
        raise ConfigError(f"Slurm refuses {script}: {said}")
    return done.stdout.strip().partition(";")[0]
