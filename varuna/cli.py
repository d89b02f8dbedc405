"""The ``varuna`` command: reads flags, calls what does the work. Starts without torch."""

from __future__ import annotations

import os
import sys
import tempfile
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import click

from varuna.cli_audit import audit
from varuna.cli_fleet import profiles
from varuna.cli_morph import events, preempt, status, workers
from varuna.cli_plan import plan
from varuna.cli_profile import profile
from varuna.cli_replay import replay
from varuna.cli_simulate import simulate
from varuna.cli_timeline import timeline
from varuna.config import SCHEDULE_NAMES, LayoutConfig, MorphConfig, ProfileConfig, TraceConfig
from varuna.errors import ConfigError, UserError
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


@main.command(context_settings={"allow_interspersed_args": False})
@click.option("-w", "--workers", type=_UP, help="Processes to start. Default: one per visible GPU, else 1.")
@click.option("-p", "--stages", type=_UP, help="Stages per pipeline. Default: chosen.")
@click.option("-b", "--micro-batch-size", type=_UP, help="Samples per micro-batch. Default: chosen.")
@click.option(
    "--schedule",
    type=click.Choice(SCHEDULE_NAMES),
    help="Order of work in a stage. Default: chosen; varuna if nothing is measured.",
)
@click.option(
    "--recompute/--no-recompute",
    default=None,
    help="Compute activations again before backward instead of keeping them. Default: chosen.",
)
@click.option(
    "--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Where logs go. Default: new."
)
@click.option(
    "--show",
    type=click.Choice(("first", "all")),
    default="first",
    show_default=True,
    help="Whose output to show: worker 0's, or everyone's, each line with its worker.",
)
@click.option("--no-check", is_flag=True, help="Skip comparing one split step with one unsplit step at start.")
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
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Run SCRIPT on several workers of this machine. What follows SCRIPT belongs to it."""
    from varuna.launch import LocalJob, run_local

    layout = _layout(stages, micro_batch_size, schedule, recompute, no_check)
    num_workers = workers if workers is not None else _default_workers()
    if layout.num_stages is not None and layout.num_stages > num_workers:
        raise ConfigError(
            f"{layout.num_stages} stages need as many workers, and there are {num_workers}. Use --workers "
            f"{layout.num_stages} or more, or fewer stages."
        )
    traced = _traced(trace, trace_steps)
    if not is_module and not Path(script).is_file():
        raise ConfigError(
            f"No file {script!r} in {Path.cwd()}. Give the path of a Python script, or -m and a module."
        )
    run_id = new_run_id(script)
    directory = _log_directory(log_dir, run_id)
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
        morph=MorphConfig.from_env(os.environ, morphs) if num_workers > 1 else None,
    )
    exit_code = run_local(job, {**os.environ, **traced, **ProfileConfig(wanted=profiles_first).to_env()})
    if exit_code == 0 and log_dir is None:
        _remove_if_empty(directory)
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


def _layout(
    stages: int | None,
    micro_batch_size: int | None,
    schedule_name: str | None,
    recompute: bool | None,
    no_check: bool,
) -> LayoutConfig:
    """What flags say, else what the environment says."""
    layout = LayoutConfig.from_env(os.environ)
    if stages is not None:
        layout = replace(layout, num_stages=stages)
    if micro_batch_size is not None:
        layout = replace(layout, micro_batch_size=micro_batch_size)
    if schedule_name is not None:
        layout = replace(layout, schedule=schedule_name)
    if recompute is not None:
        layout = replace(layout, recompute=recompute)
    return replace(layout, check=False) if no_check else layout


def _traced(path: str | None, steps: str | None) -> dict[str, str]:
    """What workers find in their environment about a trace; nothing if the environment says it already."""
    if path is None and steps is not None:
        raise ConfigError(f"--trace-steps {steps} needs a file to write to. Add --trace FILE.")
    if path is None:
        return {}
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"The trace cannot be written to {path}: there is no folder {file.parent}.")
    return TraceConfig.parse(str(file), steps or "").to_env()


def _default_workers() -> int:
    from varuna.launch import visible_gpus

    num_gpus = visible_gpus(os.environ)
    reason = f"one per visible GPU ({num_gpus})" if num_gpus else "no GPU found; use --workers for more"
    click.echo(f"varuna: {max(1, num_gpus)} worker{'s' if num_gpus > 1 else ''}: {reason}", err=True)
    return max(1, num_gpus)


def _log_directory(wanted: Path | None, run_id: str) -> Path:
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix=f"varuna-{run_id}-"))
    wanted.mkdir(parents=True, exist_ok=True)
    return wanted.absolute()


def _remove_if_empty(directory: Path) -> None:
    """Remove a directory of logs in which nothing was written, but for the journal of a job that ended well."""
    from varuna.launch.manager import JOURNAL_NAMES

    files = list(directory.iterdir())
    if not any(file.stat().st_size for file in files if file.name not in JOURNAL_NAMES):
        for file in files:
            file.unlink()
        directory.rmdir()
