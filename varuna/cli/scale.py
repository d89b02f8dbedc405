"""Flags of ``varuna run`` and ``varuna manager`` about more machines. Starts without torch."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import click

from varuna.config_scale import COMMAND, EVERY, URL, WORKERS, ScaleConfig
from varuna.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])


def scale_options(command: _Command) -> _Command:
    """Whom to ask for machines, and when."""
    for option in (
        click.option(
            "--scale-every",
            type=click.FloatRange(min=1),
            help="Seconds from one call to the next. Default: 60.",
        ),
        click.option(
            "--scale-workers",
            type=click.IntRange(min=1),
            help="Workers that the job wants. Default: as many as it has had.",
        ),
        click.option("--scale-url", metavar="URL", help="Or what it posts the same to."),
        click.option(
            "--scale-command",
            metavar="CMD",
            help="What the manager runs when there are too few workers, with JSON on standard input.",
        ),
    ):
        command = option(command)
    return command


def scale_environ(
    environ: Mapping[str, str],
    *,
    scale_command: str | None,
    scale_url: str | None,
    scale_workers: int | None,
    scale_every: float | None,
) -> dict[str, str]:
    """What the manager's launcher finds in its environment of it: flags before what ``environ`` says.

    Raises:
        ConfigError: a value that cannot be, or that needs somebody to ask.
    """
    given = {
        COMMAND: scale_command,
        URL: scale_url,
        WORKERS: None if scale_workers is None else str(scale_workers),
        EVERY: None if scale_every is None else f"{scale_every:g}",
    }
    found = {name: value for name, value in given.items() if value is not None}
    ScaleConfig.from_env({**environ, **found})
    return found


def check_has_manager(scaled: Mapping[str, str], *, has_manager: bool) -> None:
    """Raise ``ConfigError`` if flags speak of asking for machines, and nobody is there to ask."""
    if scaled and not has_manager:
        raise ConfigError(
            "There is no manager that could ask for machines: a job has one if it has several workers and goes "
            "on without those that are lost. Give --workers 2 or more, and leave out --no-morph."
        )
