"""What commands that start workers have in common: flags as values, defaults, directories."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import click

from varuna.config import SCHEDULE_NAMES, LayoutConfig, TraceConfig
from varuna.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., object])
_UP = click.IntRange(min=1)


_LAYOUT = (
    click.option("-p", "--stages", type=_UP, help="Stages per pipeline. Default: chosen."),
    click.option("-b", "--micro-batch-size", type=_UP, help="Samples per micro-batch. Default: chosen."),
    click.option(
        "--schedule",
        type=click.Choice(SCHEDULE_NAMES),
        help="Order of work in a stage. Default: chosen; varuna if nothing is measured.",
    ),
    click.option(
        "--recompute/--no-recompute",
        default=None,
        help="Compute activations again before backward instead of keeping them. Default: chosen.",
    ),
    click.option(
        "--no-check", is_flag=True, help="Skip comparing one split step with one unsplit step at start."
    ),
)
_OUTPUT = (
    click.option(
        "--log-dir", type=click.Path(file_okay=False, path_type=Path), help="Where logs go. Default: new."
    ),
    click.option(
        "--show",
        type=click.Choice(("first", "all")),
        default="first",
        show_default=True,
        help="Whose output to show: worker 0's, if it is here, or everyone's, each line with its worker.",
    ),
)


def layout_options(command: _Command) -> _Command:
    """What a user can fix of the layout; ``layout_of`` takes the values."""
    for option in reversed(_LAYOUT):
        command = option(command)
    return command


def output_options(command: _Command) -> _Command:
    """Where workers' output goes."""
    for option in reversed(_OUTPUT):
        command = option(command)
    return command


def layout_of(
    stages: int | None,
    micro_batch_size: int | None,
    schedule_name: str | None,
    recompute: bool | None,
    no_check: bool,
) -> LayoutConfig:
    """What flags say, else what the environment says."""
    flags = LayoutConfig(
        num_stages=stages,
        micro_batch_size=micro_batch_size,
        schedule=schedule_name,
        recompute=recompute,
        check=not no_check,
    )
    return flags.over(LayoutConfig.from_env(os.environ))


def check_stages(layout: LayoutConfig, num_workers: int) -> None:
    """Raise ``ConfigError`` if there are more stages than workers."""
    if layout.num_stages is not None and layout.num_stages > num_workers:
        raise ConfigError(
            f"{layout.num_stages} stages need as many workers, and there are {num_workers}. Use --workers "
            f"{layout.num_stages} or more, or fewer stages."
        )


def trace_environ(path: str | None, steps: str | None) -> dict[str, str]:
    """What workers find in their environment about a trace; nothing if the environment says it already."""
    if path is None and steps is not None:
        raise ConfigError(f"--trace-steps {steps} needs a file to write to. Add --trace FILE.")
    if path is None:
        return {}
    file = Path(path).absolute()
    if not file.parent.is_dir():
        raise ConfigError(f"The trace cannot be written to {path}: there is no folder {file.parent}.")
    return TraceConfig.parse(str(file), steps or "").to_env()


def check_script(script: str, is_module: bool) -> None:
    """Raise ``ConfigError`` if a script is not there."""
    if not is_module and not Path(script).is_file():
        raise ConfigError(
            f"No file {script!r} in {Path.cwd()}. Give the path of a Python script, or -m and a module."
        )


def default_workers() -> int:
    """One per visible GPU, else one."""
    from varuna.launch import visible_gpus

    num_gpus = visible_gpus(os.environ)
    reason = f"one per visible GPU ({num_gpus})" if num_gpus else "no GPU found; use --workers for more"
    click.echo(f"varuna: {max(1, num_gpus)} worker{'s' if num_gpus > 1 else ''}: {reason}", err=True)
    return max(1, num_gpus)


def log_directory(wanted: Path | None, run_id: str) -> Path:
    """An existing directory for logs: the one that was asked for, or a new one."""
    if wanted is None:
        return Path(tempfile.mkdtemp(prefix=f"varuna-{run_id}-"))
    return made_directory("--log-dir", wanted)


def made_directory(flag: str, path: Path, mode: int = 0o777) -> Path:
    """A directory that exists now, and in which files can be made; absolute.

    Raises:
        ConfigError: it is none.
    """
    try:
        path.mkdir(mode=mode, parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path):
            pass
    except OSError as error:
        raise ConfigError(
            f"{flag} {path}: no files can be made there: {error.strerror or error}. Give a directory to which "
            f"you may write."
        ) from error
    return path.absolute()


def remove_if_empty(directory: Path, *, ended_well: bool) -> None:
    """Remove a directory of logs in which nothing was written, but for the journal of a job that ended well."""
    from varuna.launch.manager import JOURNAL_NAMES

    files = list(directory.iterdir())
    of_no_use = JOURNAL_NAMES if ended_well else ()
    if not any(file.stat().st_size for file in files if file.name not in of_no_use):
        for file in files:
            file.unlink()
        directory.rmdir()
