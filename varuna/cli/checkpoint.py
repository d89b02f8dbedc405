"""``varuna checkpoint``: list, verify and export checkpoints; and options of ``run``. Starts without torch."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TypeVar

import click

from varuna.config_checkpoint import CheckpointConfig
from varuna.errors import ConfigError

_Command = TypeVar("_Command", bound=Callable[..., Any])
_STEP = click.option("--step", type=click.IntRange(min=0), help="That of this step. Default: the newest.")


def checkpoint_options(command: _Command) -> _Command:
    """Options of ``varuna run``: where checkpoints go, how often, and from which one it begins."""
    for option in (
        click.option(
            "--resume", help="Begin from newest, never, or a step with a checkpoint. Default: newest."
        ),
        click.option("--keep", type=click.IntRange(min=1), help="Checkpoints that stay. Default: 3."),
        click.option("--checkpoint-every", help="100 (steps) or 300s (seconds). Default: 600s."),
        click.option(
            "--checkpoint", "checkpoint_url", metavar="URL", help="Save to this directory or s3://bucket/name."
        ),
    ):
        command = option(command)
    return command


def checkpoint_environ(
    environ: Mapping[str, str],
    *,
    url: str | None,
    every: str | None,
    keep: int | None,
    resume: str | None,
) -> dict[str, str]:
    """What workers find in their environment of it: flags before what ``environ`` says.

    Raises:
        ConfigError: a value that cannot be, or a flag that needs ``--checkpoint``.
    """
    place = url or environ.get("VARUNA_CHECKPOINT", "")
    given = {"--checkpoint-every": every, "--keep": keep, "--resume": resume}
    if not place:
        for flag, value in given.items():
            if value is not None:
                raise ConfigError(f"{flag} {value} needs a place for checkpoints. Add --checkpoint URL.")
        return {}
    from varuna.checkpoint.store import check_url

    check_url(place)
    config = CheckpointConfig.parse(
        place,
        every=every or environ.get("VARUNA_CHECKPOINT_EVERY", ""),
        keep=str(keep or environ.get("VARUNA_CHECKPOINT_KEEP", "")),
        resume=resume or environ.get("VARUNA_RESUME", ""),
    )
    return config.to_env()


@click.group()
def checkpoint() -> None:
    """List, verify and export checkpoints."""


@checkpoint.command("ls")
@click.argument("url")
def list_checkpoints(url: str) -> None:
    """List what is at URL (a directory, or s3://bucket/name), newest first."""
    from varuna.checkpoint.errors import CheckpointError
    from varuna.checkpoint.find import open_save, saves_in
    from varuna.checkpoint.store import open_store

    store = open_store(url)
    try:
        saves = saves_in(store)
        rows = [("step", "saved (UTC)", "size", "parts", "directory")]
        for order in saves:
            try:
                found = open_save(store, order, check_parts=False)
            except CheckpointError as error:
                rows.append((str(order.step), "damaged", "", "", f"{order.directory}: {error}"))
                continue
            if found is None:
                rows.append((str(order.step), "incomplete", "", "", order.directory))
                continue
            manifest = found.manifest
            saved_at = manifest.saved_at.replace("T", " ").removesuffix("+00:00")
            size = _size(manifest.size_bytes)
            rows.append((str(order.step), saved_at, size, str(len(manifest.parts)), order.directory))
    except CheckpointError as error:
        _fail(error)
    if not saves:
        click.echo(f"No checkpoints in {store.url}.")
        return
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for row in rows:
        click.echo("  ".join((*(cell.rjust(width) for cell, width in zip(row, widths, strict=False)), row[4])))


@checkpoint.command()
@click.argument("url")
@_STEP
def verify(url: str, step: int | None) -> None:
    """Read a whole checkpoint at URL and compare every checksum. Exit code 1 if something is broken."""
    from varuna.checkpoint.errors import CheckpointError
    from varuna.checkpoint.find import open_save, saves_in
    from varuna.checkpoint.store import open_store
    from varuna.checkpoint.verify import problems_of

    store = open_store(url)
    try:
        for order in saves_in(store):
            if step is not None and order.step != step:
                continue
            found = open_save(store, order, check_parts=False)
            if found is None:
                continue
            problems = list(problems_of(found))
            for problem in problems:
                click.echo(problem, err=True)
            manifest = found.manifest
            what = f"{len(manifest.parts)} parts, {_size(manifest.size_bytes)}"
            if problems:
                click.echo(f"{found.directory}: {len(problems)} problems in {what}", err=True)
                sys.exit(1)
            click.echo(f"{found.directory}: ok ({what})")
            return
    except CheckpointError as error:
        _fail(error)
    wanted = "" if step is None else f" of step {step}"
    click.echo(f"No complete checkpoint{wanted} in {store.url}.", err=True)
    sys.exit(1)


@checkpoint.command()
@click.argument("url")
@click.argument("output", type=click.Path(path_type=Path))
@_STEP
@click.option(
    "--huggingface",
    is_flag=True,
    help="Make OUTPUT a directory that transformers loads, instead of one safetensors file.",
)
@click.option(
    "--source",
    type=click.Path(exists=True, file_okay=False, path_type=Path),
    help="Hugging Face directory whose configuration and tokenizer are copied.",
)
@click.option("--prefix", default="", help="Taken off every name, e.g. 'model.' for a wrapped model.")
def export(
    url: str, output: Path, *, step: int | None, huggingface: bool, source: Path | None, prefix: str
) -> None:
    """Write the weights of a checkpoint at URL to OUTPUT, under the plain model's names."""
    from varuna.checkpoint.errors import CheckpointError
    from varuna.checkpoint.export import export_huggingface, export_safetensors
    from varuna.checkpoint.find import find_checkpoint
    from varuna.checkpoint.store import open_store
    from varuna.events import Event

    if source is not None and not huggingface:
        raise click.UsageError("--source is for --huggingface.")

    def show(event: Event) -> None:
        click.echo(getattr(event, "text", event), err=True)

    store = open_store(url)
    try:
        found = find_checkpoint(store, step, publish=show)
        if found is None:
            raise CheckpointError(f"No complete checkpoint in {store.url}.")
        if huggingface:
            names = export_huggingface(found, output, source=source, prefix=prefix)
            click.echo(f"{output}: step {found.step}, {', '.join(names)}")
        else:
            size_bytes = export_safetensors(found, output, prefix=prefix)
            click.echo(f"{output}: step {found.step}, {_size(size_bytes)}")
    except CheckpointError as error:
        _fail(error)


def _fail(error: Exception) -> None:
    click.echo(f"Error: {error}", err=True)
    sys.exit(1)


def _size(size_bytes: int) -> str:
    value = float(size_bytes)
    for unit in ("B", "KB", "MB", "GB"):
        if value < 1000:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1000
    return f"{value:.1f} TB"
