"""``varuna manager`` and ``varuna agent``: a job on many machines that come and go. Start without torch."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Any

import click

from varuna.cli.checkpoint import checkpoint_environ, checkpoint_options
from varuna.cli.scale import scale_environ, scale_options
from varuna.cli.start import (
    check_script,
    default_workers,
    layout_of,
    layout_options,
    log_directory,
    made_directory,
    output_options,
    remove_if_empty,
)
from varuna.config import MorphConfig
from varuna.errors import ConfigError
from varuna.launch.naming import new_run_id

_UP = click.IntRange(min=1)
_MOST_LETTERS = 100
_SECONDS = click.FloatRange(min=0, max=86400)


@click.command()
@click.option(
    "--listen",
    default="127.0.0.1:0",
    show_default=True,
    help="HOST:PORT. An address of this machine that the others reach, or 0.0.0.0; port 0 is any.",
)
@click.option(
    "--state",
    type=click.Path(file_okay=False, path_type=Path),
    required=True,
    help="Directory for what the manager knows. Started again with the same one, it goes on.",
)
@click.option("--min-workers", type=_UP, default=1, show_default=True, help="Begin with no fewer.")
@click.option(
    "--settle", type=_SECONDS, default=5.0, show_default=True, help="And when no agent has come for so long."
)
@click.option(
    "--replace-lost/--no-replace-lost",
    "replaces",
    default=None,
    help="Have a new worker started for each one that is lost. Default: go on with fewer.",
)
@scale_options
@click.option(
    "--stay", is_flag=True, help="Stay when the job is over, to tell agents that come late how it ended."
)
def manager(
    *,
    listen: str,
    state: Path,
    min_workers: int,
    settle: float,
    replaces: bool | None,
    stay: bool,
    **scale: Any,
) -> None:
    """Manage a job whose workers run elsewhere, under `varuna agent`.

    It prints its URL and the file with the job's token, which agents need; VARUNA_TOKEN sets another token. The
    job begins when enough workers are offered; agents that come later join it. The manager ends with the job,
    with its exit code. If it dies, training goes on: start it again.
    """
    from varuna.launch.host import ManagerSettings, run_manager

    host, port = _address(listen)
    scaled = scale_environ(os.environ, **scale)
    morph = MorphConfig.from_env(os.environ, True, replaces)
    assert morph is not None
    settings = ManagerSettings(
        host=host,
        port=port,
        state_dir=made_directory("--state", state, mode=0o700),
        min_workers=min_workers,
        settle_s=settle,
        morph=morph,
        stays=stay,
    )
    sys.exit(run_manager(settings, {**os.environ, **scaled}))


@click.command(context_settings={"allow_interspersed_args": False})
@click.option(
    "--manager",
    "url",
    required=True,
    metavar="URL",
    help="What `varuna manager` has printed; or file:///STATE/url, if its directory is shared and it may come "
    "back on another machine.",
)
@click.option(
    "--token-file",
    type=click.Path(dir_okay=False, path_type=Path),
    help="File with the job's token. Default: the variable VARUNA_TOKEN.",
)
@click.option("-w", "--workers", type=_UP, help="Workers to offer. Default: one per visible GPU, else 1.")
@click.option("--name", default="", help="Of this machine. Default: its host name.")
@click.option(
    "--address",
    default="",
    help="By which other machines reach this one. Default: the one from which it reaches the manager.",
)
@click.option(
    "--grace",
    type=_SECONDS,
    help="Seconds from a signal to the end. Default: VARUNA_GRACE_S, else 30 (60 for SIGUSR1).",
)
@layout_options
@output_options
@checkpoint_options
@click.option("--from-launcher", is_flag=True, hidden=True, help="Token and orders come on standard input.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def agent(
    *,
    url: str,
    from_launcher: bool,
    checkpoint_url: str | None,
    checkpoint_every: str | None,
    keep: int | None,
    resume: str | None,
    token_file: Path | None,
    workers: int | None,
    name: str,
    address: str,
    grace: float | None,
    stages: int | None,
    micro_batch_size: int | None,
    schedule: str | None,
    recompute: bool | None,
    no_check: bool,
    log_dir: Path | None,
    show: str,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Be one of the machines on which a job runs SCRIPT. What follows SCRIPT belongs to it.

    Every machine gives the same script, arguments and layout. This command may be started and ended at any
    time: its workers join and leave the job. SIGTERM, Ctrl-C and what a cloud announces are notices: workers
    hand over what they hold and leave; a second signal ends them at once. It exits with the job's exit code.
    """
    from varuna.launch.agent import machine_name
    from varuna.launch.job import LocalJob
    from varuna.launch.machine import MachineJob, run_agent
    from varuna.launch.orders import LauncherOrders
    from varuna.launch.preflight.start import check_places
    from varuna.launch.token import read_token

    orders = LauncherOrders() if from_launcher else None
    if orders is not None:
        os.environ.update(orders.header.environ)
    layout = layout_of(stages, micro_batch_size, schedule, recompute, no_check)
    token = read_token(os.environ, token_file) if orders is None else orders.header.token
    saved = checkpoint_environ(os.environ, url=checkpoint_url, every=checkpoint_every, keep=keep, resume=resume)
    check_script(script, is_module)
    machine = name or machine_name()
    if len(machine) > _MOST_LETTERS or not machine.isprintable():
        raise ConfigError(f"{machine[:80]!r} is no name of a machine: give up to {_MOST_LETTERS} letters.")
    check_places({**os.environ, **saved})
    directory = log_directory(log_dir, new_run_id(script))
    job = LocalJob(
        target=script,
        is_module=is_module,
        arguments=arguments,
        num_workers=workers if workers is not None else default_workers(),
        layout=layout,
        log_dir=directory,
        show_all=show == "all",
        morph=MorphConfig(),
    )
    offered = MachineJob(
        job=job, url=url, token=token, machine=machine, address=address, grace_s=grace, orders=orders
    )
    exit_code = run_agent(offered, {**os.environ, **saved})
    if log_dir is None:
        remove_if_empty(directory, ended_well=exit_code == 0)
    sys.exit(exit_code)


def _address(text: str) -> tuple[str, int]:
    host, colon, port = text.rpartition(":")
    if not colon or not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigError(
            f"--listen {text!r} is no HOST:PORT. Give 127.0.0.1:0, or an address of this machine."
        )
    return host, int(port)
