"""``varuna run --slurm`` and ``varuna slurm``: what their flags mean. Start without torch."""

from __future__ import annotations

import os
import shlex
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from varuna.cli.elsewhere import ElsewhereFlags
from varuna.cli.hosts import named_variables, parse_env_files
from varuna.cli.sbatch import SbatchCommand, sbatch_options_of
from varuna.errors import ConfigError
from varuna.launch.naming import new_run_id

if TYPE_CHECKING:
    from varuna.launch.slurm.job import SlurmJob

_Command = TypeVar("_Command", bound=Callable[..., object])
_DIRECTORY = click.Path(file_okay=False, path_type=Path)
_nodes = click.option(
    "--nodes",
    metavar="[MIN-]N",
    help="With --slurm or --ray: machines; training begins with MIN of them. Default: 1; of Ray, all.",
)
_print = click.option(
    "--print", "prints", is_flag=True, help="With --slurm: print the script for sbatch instead."
)


def slurm_options(command: _Command) -> _Command:
    """The flags of `varuna run` about Slurm."""
    for option in (
        _print,
        _nodes,
        click.option(
            "--slurm",
            "on_slurm",
            is_flag=True,
            help="Submit it to Slurm, each machine a task of an array. Long options of sbatch may be given, "
            "too: --partition gpu --gpus-per-node 8.",
        ),
    ):
        command = option(command)
    return command


def check_slurm_flags(on_slurm: bool, nodes: str | None, prints: bool, elsewhere: Mapping[str, object]) -> None:
    """Raise ``ConfigError`` for flags that mean nothing together.

    Args:
        on_slurm: whether it is for Slurm.
        nodes: how many machines of it.
        prints: only the script.
        elsewhere: values of flags that name machines in another way.
    """
    given = [flag for flag, value in elsewhere.items() if value is not None]
    if on_slurm and given:
        raise ConfigError(f"--slurm and {given[0]} are two ways to find machines. Give one of them.")
    if not on_slurm and nodes is not None and "--ray" not in given:
        raise ConfigError(
            f"--nodes {nodes} is about Slurm and Ray. Add --slurm or --ray ADDRESS, or give --workers for this "
            f"machine."
        )
    if not on_slurm and prints:
        raise ConfigError("--print is about Slurm. Add --slurm.")


def run_on_slurm(
    flags: ElsewhereFlags, environ: Mapping[str, str], *, nodes: str | None, sbatch: Sequence[str], prints: bool
) -> int:
    """Submit it, or print the script; returns the exit code.

    Args:
        flags: what is run; ``log_dir`` is the job's directory.
        environ: of this process.
        nodes: how many machines, ``4`` or ``2-8``; None for one.
        sbatch: options of sbatch.
        prints: the script, instead of submitting it.

    Raises:
        ConfigError: a flag that cannot be, or Slurm does not want the job.
    """
    from varuna.launch.slurm.job import SlurmJob, batch_script, read_nodes
    from varuna.launch.slurm.submit import forget_job, write_job
    from varuna.morph.notices_signal import duration_from_env

    wanted = read_nodes(nodes or "1")
    name = new_run_id(flags.script[0])
    directory = (flags.log_dir or Path(f"slurm-{name}")).absolute()
    job = SlurmJob(
        name=name,
        directory=os.getcwd(),
        python=environ.get("VARUNA_REMOTE_PYTHON") or sys.executable,
        srun=tuple(shlex.split(environ.get("VARUNA_SRUN", ""))) or ("srun",),
        agent=(*flags.agent, *flags.script),
        environ={
            **parse_env_files(flags.env_files),
            **named_variables(flags.env, environ),
            **flags.environ,
        },
        sbatch=tuple(sbatch),
        min_nodes=wanted.least,
        workers=flags.workers,
        replaces=flags.replaces,
        settle_s=duration_from_env("VARUNA_SETTLE_S", environ.get("VARUNA_SETTLE_S") or "10"),
    )
    script = batch_script(job, directory, sbatch, wanted.most, founds=True)
    write_job(job, directory)
    try:
        return _hand_over(job, directory, "job", script, prints=prints)
    except ConfigError:
        forget_job(directory)
        raise


@click.group()
def slurm() -> None:
    """Machines for a job that `varuna run --slurm` has begun."""


@slurm.command(cls=SbatchCommand)
@click.argument("directory", type=_DIRECTORY)
@click.option("--nodes", metavar="N", default="1", show_default=True, help="How many.")
@click.option("--print", "prints", is_flag=True, help="Print the script for sbatch instead of submitting it.")
def add(*, directory: Path, nodes: str, prints: bool) -> None:
    """Submit more machines for the job in DIRECTORY, which join it when they have begun.

    Options of sbatch are those of the job; others may be given, and win: --partition spot.
    """
    from varuna.launch.slurm.job import batch_script, read_nodes
    from varuna.launch.slurm.submit import read_job

    directory = directory.absolute()
    job = read_job(directory)
    options = (*job.sbatch, *sbatch_options_of(click.get_current_context()))
    script = batch_script(job, directory, options, read_nodes(nodes).most, founds=False)
    sys.exit(_hand_over(job, directory, "join", script, prints=prints))


@slurm.command(hidden=True)
@click.argument("directory", type=_DIRECTORY)
@click.option("--founds", is_flag=True, help="The first task of the array runs the manager, too.")
def task(*, directory: Path, founds: bool) -> None:
    """Be one machine of the job in DIRECTORY: what the batch script runs."""
    from varuna.launch.slurm.task import run_task

    sys.exit(run_task(directory.absolute(), os.environ, founds=founds))


def _hand_over(job: SlurmJob, directory: Path, stem: str, script: str, *, prints: bool) -> int:
    from varuna.launch.slurm.submit import submit, write_script

    if prints:
        click.echo(script, nl=False)
        return 0
    path = write_script(directory, stem, script)
    sbatch = shlex.split(os.environ.get("VARUNA_SBATCH", "")) or ["sbatch"]
    job_id = submit(sbatch, path, os.environ)
    click.echo(f"varuna: Slurm job {job_id}; its files are in {directory}", err=True)
    place = shlex.quote(os.path.relpath(directory))
    click.echo(f"varuna: more machines: varuna slurm add {place} --nodes 1", err=True)
    click.echo(
        f"varuna: one less: scancel --signal=TERM {job_id}_N    the end: scancel --name={job.name}", err=True
    )
    return 0
