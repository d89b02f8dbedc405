"""``varuna profile``: measure the model of a script, write the file, train nothing. Starts without torch."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from pathlib import Path

import click

from varuna.config import LayoutConfig, ProfileConfig, read_sizes
from varuna.errors import ConfigError
from varuna.launch.naming import new_run_id


@click.command(context_settings={"ignore_unknown_options": True})
@click.option(
    "-o",
    "--output",
    type=click.Path(dir_okay=False, path_type=Path),
    required=True,
    help="File to write, for `varuna plan` and `varuna simulate`.",
)
@click.option(
    "-w",
    "--workers",
    type=click.IntRange(min=1),
    help="Processes to measure with; two or more also measure messages. Default: one per visible GPU, else 1.",
)
@click.option("--micro-batch-sizes", default="", help="Such as 1,2,4. Default: as far as it gets faster.")
@click.option("-m", "is_module", is_flag=True, help="SCRIPT is the name of a module, as for python -m.")
@click.argument("script")
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def profile(
    *,
    output: Path,
    workers: int | None,
    micro_batch_sizes: str,
    is_module: bool,
    script: str,
    arguments: tuple[str, ...],
) -> None:
    """Measure the model that SCRIPT trains: time and memory of its sections, messages between workers.

    SCRIPT is started as `varuna run` does, and ends before its first step. What follows it and is none of the
    options below belongs to it; after -- everything does.
    """
    from varuna.launch import LocalJob, run_local, visible_gpus

    if not is_module and not Path(script).is_file():
        raise ConfigError(
            f"No file {script!r} in {Path.cwd()}. Give the path of a Python script, or -m and a module."
        )
    if not output.absolute().parent.is_dir():
        raise ConfigError(f"The profile cannot be written to {output}: there is no folder {output.parent}.")
    wanted = ProfileConfig(
        output=output.absolute(), micro_batch_sizes=read_sizes("--micro-batch-sizes", micro_batch_sizes)
    )
    before = _written_at(output)
    run_id = new_run_id(script)
    log_dir = Path(tempfile.mkdtemp(prefix=f"varuna-{run_id}-"))
    job = LocalJob(
        target=script,
        is_module=is_module,
        arguments=arguments,
        num_workers=workers or max(1, visible_gpus(os.environ)),
        layout=LayoutConfig.from_env(os.environ),
        run_id=run_id,
        log_dir=log_dir,
    )
    exit_code = run_local(job, {**os.environ, **wanted.to_env()})
    if exit_code != 0:
        sys.exit(exit_code)
    shutil.rmtree(log_dir)
    if _written_at(output) == before:
        raise ConfigError(
            f"{script} ended without starting a job, so there is nothing to measure. It must call train() of a "
            f"varuna.Varuna."
        )
    click.echo(f"varuna: profile written to {output}", err=True)


def _written_at(path: Path) -> int | None:
    return path.stat().st_mtime_ns if path.exists() else None
