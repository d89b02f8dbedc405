"""``varuna run --ray ADDRESS``: what its flags mean. Starts without torch, and without Ray."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

import click

from varuna.cli.elsewhere import ElsewhereFlags
from varuna.cli.hosts import environ_for
from varuna.cli.start import log_directory
from varuna.config import MorphConfig
from varuna.errors import ConfigError
from varuna.launch.naming import new_run_id

if TYPE_CHECKING:
    from varuna.launch.ray.cluster import RayCluster
    from varuna.launch.ray.nodes import Node

_Command = TypeVar("_Command", bound=Callable[..., object])


def ray_options(command: _Command) -> _Command:
    """The flags of `varuna run` about a Ray cluster."""
    for option in (
        click.option(
            "--ray-resources",
            metavar="NAME=N,...",
            help="With --ray: what to reserve on each node, such as GPU=4,CPU=8; nodes with less are not used. "
            "Default: all GPUs, or where no node has any, a CPU per worker.",
        ),
        click.option(
            "--ray",
            "ray_address",
            metavar="ADDRESS",
            help="Run on the nodes of this Ray cluster: auto, or HOST:PORT of its head. Needs varuna[ray].",
        ),
    ):
        command = option(command)
    return command


def check_ray_flags(address: str | None, resources: str | None, hosts: Path | None) -> None:
    """Raise ``ConfigError`` for flags that mean nothing together."""
    if address is not None and hosts is not None:
        raise ConfigError(
            f"--hosts {hosts} and --ray {address} are two ways to find machines. Give one of them."
        )
    if address is None and resources is not None:
        raise ConfigError(f"--ray-resources {resources} is about a Ray cluster. Add --ray ADDRESS.")


def run_on_ray(
    ray: str, flags: ElsewhereFlags, environ: Mapping[str, str], *, nodes: str | None, resources: str | None
) -> int:
    """Run it on the nodes of a Ray cluster; returns the exit code.

    Args:
        ray: the cluster's address.
        flags: what is run.
        environ: of this process.
        nodes: how many, ``4`` or ``2-8``; None for all.
        resources: to reserve on each node; None for the usual.

    Raises:
        ConfigError: a flag that cannot be, Ray is not installed, or there is no such cluster.
    """
    from varuna.launch.host import ManagerSettings
    from varuna.launch.orders import Header
    from varuna.launch.ray.cluster import RayCluster
    from varuna.launch.ray.fleet import RayJob, run_ray_fleet
    from varuna.launch.ray.machine import RayCommand
    from varuna.launch.ray.nodes import fewest_workers, needs_of, read_resources
    from varuna.launch.slurm.job import read_nodes
    from varuna.morph.notices_signal import duration_from_env

    wanted = read_nodes(nodes) if nodes is not None else None
    reserved = read_resources(resources) if resources is not None else None
    morph = MorphConfig.from_env(environ, True, flags.replaces)
    assert morph is not None
    header = Header(token="", environ={**environ_for(flags.env, flags.env_files, environ), **flags.environ})
    settle_s = duration_from_env("VARUNA_SETTLE_S", environ.get("VARUNA_SETTLE_S") or "10")
    cluster = RayCluster(ray)
    try:
        present = _nodes_of(cluster)
        needs = needs_of(reserved, flags.workers, wanted.most if wanted else None, present)
        settings = ManagerSettings(
            host=flags.address or cluster.here,
            port=0,
            state_dir=log_directory(flags.log_dir, new_run_id(flags.script[0])),
            min_workers=fewest_workers(needs, present, wanted.least) if wanted else 1,
            settle_s=settle_s,
            morph=morph,
        )
        command = RayCommand(directory=cluster.directory, agent=(*flags.agent, *flags.script), header=header)
        job = RayJob(cluster=cluster, needs=needs, settings=settings, command=command)
        return run_ray_fleet(job, environ)
    finally:
        cluster.close()


def _nodes_of(cluster: RayCluster) -> tuple[Node, ...]:
    from varuna.launch.ray.cluster import RayTrouble

    try:
        return cluster.nodes()
    except RayTrouble as trouble:
        raise ConfigError(f"Ray does not tell which nodes there are: {trouble}.") from trouble
