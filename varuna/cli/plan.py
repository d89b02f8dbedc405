"""``varuna plan``: the fastest plan for a profile and some machines, and why. Starts without torch."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from varuna.config import SCHEDULE_NAMES
from varuna.errors import ConfigError

if TYPE_CHECKING:
    from varuna.plan.choose import Choice
    from varuna.plan.cluster import Cluster

_UP = click.IntRange(min=1)
_WIDTH = 160

_PATIENCE = 10
"""A person waits longer than a running job does."""

_FILE = click.Path(dir_okay=False, path_type=Path)
_UNITS = {
    "": 1,
    "k": 10**3,
    "m": 10**6,
    "g": 10**9,
    "t": 10**12,
    "ki": 2**10,
    "mi": 2**20,
    "gi": 2**30,
    "ti": 2**40,
}
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*([kmgt]i?)?b?", re.IGNORECASE)


@click.command()
@click.argument("profile")
@click.option("--machines", required=True, help="25x4: 25 machines of 4 devices; 25x4,3x8: two kinds; 7: 7x1.")
@click.option("-g", "--batch-size", type=_UP, required=True, help="Samples per global batch.")
@click.option("--memory", help="Of each device, such as 16GB or 15GiB. Default: the profile's.")
@click.option("-p", "--stages", type=_UP, help="Stages per pipeline. Default: chosen.")
@click.option("-b", "--micro-batch-size", type=_UP, help="Samples per micro-batch. Default: chosen.")
@click.option(
    "--schedule", type=click.Choice(SCHEDULE_NAMES), help="Order of work in a stage. Default: chosen."
)
@click.option(
    "--recompute/--no-recompute",
    default=None,
    help="Compute activations again before backward instead of keeping them. Default: chosen for each stage.",
)
@click.option("--explain", is_flag=True, help="Show what else was considered, and why it was not chosen.")
@click.option("--rows", type=_UP, default=20, show_default=True, help="Rows of that table.")
@click.option("--json", "as_json", is_flag=True, help="Print all of it as JSON.")
@click.option("-o", "--output", type=_FILE, help="Write the plan to this file, for `varuna simulate`.")
def plan(
    *,
    profile: str,
    machines: str,
    batch_size: int,
    memory: str | None,
    stages: int | None,
    micro_batch_size: int | None,
    schedule: str | None,
    recompute: bool | None,
    explain: bool,
    rows: int,
    as_json: bool,
    output: Path | None,
) -> None:
    """Choose the fastest plan for a model on some machines.

    PROFILE is a file from `varuna profile`, or a ready one such as gpt2-2.5b@v100@10gbit.
    """
    from varuna.observe.prediction_table import render_prediction
    from varuna.plan.choose import choose_plan
    from varuna.plan.estimate import load_profile
    from varuna.plan.explain import choice_json
    from varuna.plan.profile_file import write_plan

    if output is not None and not output.absolute().parent.is_dir():
        raise ConfigError(f"The plan cannot be written to {output}: there is no folder {output.parent}.")
    numbers = load_profile(profile)
    choice = choose_plan(
        numbers,
        _cluster(machines, memory),
        batch_size=batch_size,
        num_stages=stages,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
        recompute=recompute,
        patience=_PATIENCE,
    )
    if output is not None:
        write_plan(choice.plan, output, choice.reason)
    if as_json:
        click.echo(choice_json(choice))
        return
    click.echo(choice.reason)
    click.echo()
    click.echo(render_prediction(choice.prediction, choice.plan, numbers), nl=False)
    if explain:
        _explain(choice, rows)


def _cluster(machines: str, memory: str | None) -> Cluster:
    from varuna.plan.cluster import Cluster

    cluster = Cluster.parse(machines)
    if memory is None:
        return cluster
    memory_bytes = parse_bytes(memory)
    return Cluster(machines=tuple(replace(machine, memory_bytes=memory_bytes) for machine in cluster.machines))


def parse_bytes(text: str) -> int:
    """``16GB``, ``15.5 GiB``, ``800M``, or a plain number of bytes.

    Raises:
        ConfigError: it cannot be read, or is not above 0.
    """
    match = _SIZE.fullmatch(text.strip())
    num_bytes = int(float(match[1]) * _UNITS[(match[2] or "").lower()]) if match else 0
    if num_bytes < 1:
        raise ConfigError(f"Memory {text!r} cannot be read. Write a size above 0 with a unit: 16GB or 15GiB.")
    return num_bytes


def _explain(choice: Choice, num_rows: int) -> None:
    from rich.console import Console
    from rich.table import Table

    from varuna.plan.explain import COLUMNS, NOTE, candidate_rows, select

    chosen = select(choice.candidates, num_rows)
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in COLUMNS:
        is_text = column in ("P x D", "schedule", "why not")
        table.add_column(column, justify="left" if is_text else "right", no_wrap=column != "why not")
    for row in candidate_rows(chosen):
        table.add_row(*row, style="green" if row[-1] == "chosen" else None)
    console = Console(highlight=False, width=max(_WIDTH, Console().width))
    console.print()
    console.print(table)
    left = len(choice.candidates) - len(chosen)
    console.print(f"{NOTE} {left} more rows with --rows or --json." if left else NOTE)
