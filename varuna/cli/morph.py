"""Commands for a run that is at work: ``varuna status``, ``events``, ``preempt`` and ``workers add``."""

from __future__ import annotations

import functools
import os
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

import click

from varuna.errors import ConfigError

if TYPE_CHECKING:
    from rich.console import Group

    from varuna.morph.client import RunClient
    from varuna.morph.views import Status

_WATCH_S = 0.5


def run_options(command: Callable[..., None]) -> Callable[..., None]:
    """Which run a command is for; it is given a ``client`` for it."""

    @functools.wraps(command)
    def with_client(*, run_id: str, url: str, token_file: Path | None, **given: object) -> None:
        command(client=_client(run_id, url, token_file), **given)

    for option in (
        click.option(
            "--token-file",
            type=click.Path(dir_okay=False, path_type=Path),
            help="With --manager: file with the job's token. Default: the variable VARUNA_TOKEN.",
        ),
        click.option(
            "--manager",
            "url",
            default="",
            metavar="URL",
            help="Of a run that is managed on another machine: what `varuna agent` is given, too.",
        ),
        click.option("--run", "run_id", default="", help="Name of a run on this machine. Default: the newest."),
    ):
        with_client = option(with_client)
    return with_client


@click.command()
@click.option("--watch", is_flag=True, help="Go on showing it until the run ends.")
@run_options
def status(*, watch: bool, client: RunClient) -> None:
    """Show a run: its workers, generation and plan, and what happened last."""
    from rich.console import Console
    from rich.live import Live

    console = Console()
    if not watch:
        console.print(render_status(client.run.run_id, client.status()))
        return
    with Live(console=console, auto_refresh=False) as live:
        while client.is_alive():
            try:
                live.update(render_status(client.run.run_id, client.status()), refresh=True)
            except ConfigError:  # it has just ended, or its manager is being started again
                continue
            finally:
                time.sleep(_WATCH_S)


@click.command()
@click.option("-f", "--follow", is_flag=True, help="Go on with what comes, until the run ends.")
@run_options
def events(*, follow: bool, client: RunClient) -> None:
    """Print what has happened in a run, one JSON object a line."""
    import msgspec

    for event in client.events(follow=follow):
        sys.stdout.write(msgspec.json.encode(event).decode() + "\n")
        sys.stdout.flush()


@click.command()
@click.argument("target", metavar="WORKER|MACHINE")
@click.option(
    "--deadline", type=click.FloatRange(min=0), default=0.0, help="Seconds until it is gone. Default: no hurry."
)
@run_options
def preempt(*, target: str, deadline: float, client: RunClient) -> None:
    """Have a worker, or all workers of a machine, hand over what they hold and leave.

    A worker is called by its number, as in its log's name, or by its whole name in `varuna status`.
    """
    asked = client.preempt(target, deadline)
    click.echo(f"asked to leave: {', '.join(asked)}")


@click.group()
def workers() -> None:
    """Change the number of workers of a run."""


@workers.command()
@click.argument("count", type=click.IntRange(min=1))
@click.option("--machine", default="", help="Where. Default: anywhere.")
@run_options
def add(*, count: int, machine: str, client: RunClient) -> None:
    """Start COUNT more workers, which join the run when they are ready."""
    where = client.add_workers(count, machine)
    click.echo(f"asked {where} for {count} more worker{'s' if count > 1 else ''}")


def render_status(run_id: str, status: Status) -> Group:
    """A status for a terminal."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("worker", "machine", "status", "rank", "work", "note"):
        table.add_column(column)
    for worker in status.workers:
        note = worker.gone_reason or (f"leaving ({worker.leaving})" if worker.leaving else "")
        if not note and not worker.is_connected and worker.status in ("ready", "member"):
            note = "not connected"
        rank = "" if worker.rank is None else str(worker.rank)
        style = "dim" if worker.status == "gone" else ""
        cells = (worker.incarnation, worker.machine, worker.status, rank, worker.position, note)
        table.add_row(*(Text(cell, style=style) for cell in cells))
    plan = status.plan
    layout = "no plan yet"
    if plan is not None:
        depths = " + ".join(str(len(pipeline.stages)) for pipeline in plan.pipelines)
        layout = (
            f"{len(plan.pipelines)} pipeline{'s' if len(plan.pipelines) > 1 else ''} of {depths} stages, "
            f"micro-batches of {plan.micro_batch_size} of {plan.batch_size} samples, schedule {plan.schedule}"
        )
    head = Text(f"{run_id}: {status.phase}, generation {status.generation}, {status.num_committed} steps done")
    lines = [Text(f"{event.at[11:19]}  {event.kind:<9} {event.text}", style="dim") for event in status.events]
    return Group(head, Text(layout), Text(""), table, Text(""), *lines)


def _client(run_id: str, url: str, token_file: Path | None) -> RunClient:
    from varuna.config import cache_dir
    from varuna.launch.token import read_token
    from varuna.morph.client import RunClient, run_at
    from varuna.morph.runs import find_run
    from varuna.morph.whereabouts import url_now

    if url:
        if run_id:
            raise ConfigError(f"--run {run_id} is for runs on this machine. Leave it out, or --manager {url}.")
        return RunClient(run_at(url_now(url), read_token(os.environ, token_file)))
    if token_file is not None:
        raise ConfigError(f"--token-file {token_file} belongs to --manager URL, which is missing.")
    directory = cache_dir(os.environ)
    return RunClient(find_run(directory, run_id), directory)
