"""What `varuna run` is given for workers on other machines, however these are found."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class ElsewhereFlags:
    """The flags that ``--hosts``, ``--ray`` and ``--slurm`` have in common.

    Attributes:
        address: of this machine, as the others reach it; empty to find out.
        env: ``NAME=VALUE``, or ``NAME`` for the value that it has here.
        env_files: files of such lines.
        environ: what other flags of `varuna run` mean to workers.
        workers: a machine; None leaves it to the file, or the machine.
        log_dir: gets logs and what the manager knows; None for a new one.
        replaces: a new worker for each one that is lost.
        agent: flags of ``varuna agent``.
        script: the script and its arguments.
    """

    address: str
    env: Sequence[str]
    env_files: Sequence[Path]
    environ: Mapping[str, str]
    workers: int | None
    log_dir: Path | None
    replaces: bool | None
    agent: Sequence[str]
    script: Sequence[str]
