"""The ``varuna`` command: reads flags, calls what does the work. Starts without torch."""

from __future__ import annotations

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import click

from varuna.cli.audit import audit
from varuna.cli.checkpoint import checkpoint, checkpoint_environ, checkpoint_options
from varuna.cli.doctor import doctor
from varuna.cli.elsewhere import ElsewhereFlags
from varuna.cli.fleet import profiles
from varuna.cli.hosts import check_machine_flags, hosts_options, run_on_hosts
from varuna.cli.k8s import k8s
from varuna.cli.machines import agent, manager
from varuna.cli.morph import events, preempt, status, workers
from varuna.cli.plan import plan
from varuna.cli.profile import profile
from varuna.cli.ray import check_ray_flags, ray_options, run_on_ray
from varuna.cli.replay import replay
from varuna.cli.sbatch import SbatchCommand, sbatch_options_of
from varuna.cli.scale import check_has_manager, scale_environ, scale_options
from varuna.cli.simulate import simulate
from varuna.cli.slurm import check_slurm_flags, run_on_slurm, slurm, slurm_options
from varuna.cli.start import (
    check_script,
    check_stages,
    default_workers,
    layout_of,
    layout_options,
    log_directory,
    output_options,
    remove_if_empty,
    trace_environ,
)
from varuna.cli.timeline import timeline
from varuna.config import SCHEDULE_NAMES, MorphConfig, ProfileConfig
from varuna.errors import UserError
from varuna.launch.naming import new_run_id

_UP = click.IntRange(min=1)


class _Group(click.Group):
    """Shows a user's error as one line, and exits with 2 as for a wrong flag."""

    def invoke(self, ctx: click.Context) -> object:
        try:
            return super().invoke(ctx)
        except UserError as error:
            raise click.UsageError(str(error)) from error


def _version() -> str:
    from importlib.metadata import PackageNotFoundError, version  # slow to import

    try:
        return version("varuna")
    except PackageNotFoundError:  # a source tree on the path, not installed
        return "unknown (not installed)"


def _print_version(ctx: click.Context, _parameter: click.Parameter, wanted: bool) -> None:
    if wanted:
        click.echo(f"varuna {_version()}")
        ctx.exit()


@click.group(cls=_Group, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.option(
    "--version",
    is_flag=True,
    expose_value=False,
    is_eager=True,
    callback=_print_version,
    help="Show the version and exit.",
)
def main() -> None:
    """Train PyTorch models too large for one GPU on whatever machines there are."""


@main.command(cls=SbatchCommand, context_settings={"allow_interspersed_args": False})
@click.option("-w", "--workers", type=_UP, help="Processes to start. Default: one per visible GPU, else 1.")
@layout_options
@output_options
@click.option(
    "--profile/--no-profile",
    "profiles_first",
    default=None,
    help="Measure the model before planning. Default: if stages or micro-batch size are to be chosen.",
)
@click.option("--trace", type=click.Path(dir_okay=False), help="Record some steps for https://ui.perfetto.dev.")
@click.option("--trace-steps", help="Which: 5:8 is steps 5, 6 and 7, counted from 0. Default: 2:5.")
@click.option(
    "--morph/--no-morph",
    "morphs",
    default=None,
    help="Go on when workers come and go, or end with the first that is lost. Default: go on.",
)
@click.option(
    "--replace-lost/--no-replace-lost",
    "replaces",
    default=None,
    help="Start a new worker for each one that is lost, or go on with fewer. Default: go on with fewer.",
)
@checkpoint_options
@hosts_options
@ray_options
@slurm_options
@scale_options
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def run(
    *,
    workers: int | None,
    stages: int | None,
    micro_batch_size: int | None,
    schedule: str | None,
    recompute: bool | None,
    log_dir: Path | None,
    show: str,
    no_check: bool,
    profiles_first: bool | None,
    trace: str | None,
    trace_steps: str | None,
    morphs: bool | None,
    replaces: bool | None,
    checkpoint_url: str | None,
    checkpoint_every: str | None,
    keep: int | None,
    resume: str | None,
    hosts: Path | None,
    address: str,
    env: tuple[str, ...],
    env_files: tuple[Path, ...],
    ray_address: str | None,
    ray_resources: str | None,
    on_slurm: bool,
    nodes: str | None,
    prints: bool,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
    **scale: Any,
) -> None:
    """Run SCRIPT on several workers, here, on machines of a file, a Ray cluster, or Slurm.

    What follows SCRIPT belongs to it.
    """
    from varuna.launch import LocalJob, run_local
    from varuna.launch.preflight.start import check_places

    layout = layout_of(stages, micro_batch_size, schedule, recompute, no_check)
    traced = trace_environ(trace, trace_steps)
    saved = checkpoint_environ(os.environ, url=checkpoint_url, every=checkpoint_every, keep=keep, resume=resume)
    profiled = ProfileConfig(wanted=profiles_first).to_env()
    scaled = scale_environ(os.environ, **scale)
    check_ray_flags(ray_address, ray_resources, hosts)
    check_slurm_flags(on_slurm, nodes, prints, {"--hosts": hosts, "--ray": ray_address})
    elsewhere = {"--hosts": hosts, "--ray": ray_address, "--slurm": on_slurm}
    check_machine_flags(elsewhere, address=address, env=env, env_files=env_files, morphs=morphs)
    morph = MorphConfig.from_env(os.environ, morphs, replaces)
    if any(elsewhere.values()):
        check_script(script, is_module)
        flags = ElsewhereFlags(
            address=address,
            env=env,
            env_files=env_files,
            environ={**layout.to_env(), **traced, **saved, **profiled},
            workers=workers,
            log_dir=log_dir,
            replaces=replaces,
            agent=("--show", show, *(("-m",) if is_module else ())),
            script=(script, *arguments),
        )
        environ = {**os.environ, **scaled}
        if hosts is not None:
            sys.exit(run_on_hosts(hosts, flags, environ))
        if ray_address is not None:
            sys.exit(run_on_ray(ray_address, flags, environ, nodes=nodes, resources=ray_resources))
        sbatch = sbatch_options_of(click.get_current_context())
        flags = replace(flags, environ={**flags.environ, **scaled})
        sys.exit(run_on_slurm(flags, os.environ, nodes=nodes, sbatch=sbatch, prints=prints))
    num_workers = workers if workers is not None else default_workers()
    check_stages(layout, num_workers)
    check_script(script, is_module)
    check_has_manager(scaled, has_manager=morph is not None and num_workers > 1)
    check_places({**os.environ, **saved})
    run_id = new_run_id(script)
    directory = log_directory(log_dir, run_id)
    if num_workers > 1:
        others = "worker 1" if num_workers == 2 else f"workers 1-{num_workers - 1}"
        click.echo(f"varuna: {num_workers} workers; output of {others} goes to {directory}", err=True)
    job = LocalJob(
        target=script,
        is_module=is_module,
        arguments=arguments,
        num_workers=num_workers,
        layout=layout,
        run_id=run_id,
        log_dir=directory,
        show_all=show == "all",
        morph=morph if num_workers > 1 else None,
    )
    exit_code = run_local(job, {**os.environ, **traced, **saved, **profiled, **scaled})
    if log_dir is None:
        remove_if_empty(directory, ended_well=exit_code == 0)
    sys.exit(exit_code)


@main.command()
@click.argument("name", type=click.Choice(SCHEDULE_NAMES))
@click.option("-p", "--stages", type=_UP, required=True, help="Stages of the pipeline.")
@click.option("-n", "--micro-batches", type=_UP, required=True, help="Micro-batches per global batch.")
@click.option("--recompute", is_flag=True, help="Recompute activations, in every stage but the last.")
def schedule(name: str, stages: int, micro_batches: int, recompute: bool) -> None:
    """Show schedule NAME: what each stage does in which order, one row per stage."""
    from varuna.plan import render_schedule

    flags = [recompute and stage_index < stages - 1 for stage_index in range(stages)]
    click.echo(render_schedule(name, stages, micro_batches, flags))


main.add_command(manager)
main.add_command(agent)
main.add_command(doctor)
main.add_command(k8s)
main.add_command(slurm)
main.add_command(checkpoint)
main.add_command(plan)
main.add_command(profile)
main.add_command(simulate)
main.add_command(replay)
main.add_command(profiles)
main.add_command(timeline)
main.add_command(status)
main.add_command(events)
main.add_command(preempt)
main.add_command(audit)
main.add_command(workers)
