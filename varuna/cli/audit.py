"""``varuna audit``: whether every step of a run happened once, with exactly the samples that it should have."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import click

if TYPE_CHECKING:
    from varuna.morph.ledger_table import LedgerView

_NUM_SHOWN = 20


@click.command()
@click.argument("target", metavar="[RUN|JOURNAL]", default="")
@click.option(
    "--steps",
    type=click.IntRange(min=0),
    help="How many there should be, those before a checkpoint that it began from included. Default: any.",
)
def audit(*, target: str, steps: int | None) -> None:
    r"""Check which samples a run has trained on: nothing lost, nothing twice, nothing weighted otherwise.

    RUN is the name of a run that is at work; the newest by default. JOURNAL is a journal.sqlite, or the folder
    of logs (`varuna run --log-dir`) that it is in, of a run that is at work or over.

    Which samples a step uses is a pure function of the seed, the step, the dataset's length and the batch size
    (`varuna.sample_ids`). It is computed again for every step and compared with what the manager has written
    down and with what workers have told that they read.

    \b
    Exit codes: 0: as it should be; 1: something is wrong, each on a line; 2: there is no such journal.

    A job without a manager (`torchrun`, one worker, `--no-morph`) has no journal: it ends with the first worker
    that is lost, and until then its steps are those of varuna.sample_ids.
    """
    from varuna.morph.ledger import audit as findings_of
    from varuna.morph.ledger_table import read_ledger
    from varuna.morph.runs import INCOMPLETE_NAME

    path = _journal(target)
    view = read_ledger(path)
    findings = [finding.text for finding in findings_of(view.entries, view.order, steps, view.shares)]
    if path.name == INCOMPLETE_NAME:
        findings.append("The journal could not be written any more; what happened after that is not known.")
    for text in findings[:_NUM_SHOWN]:
        click.echo(text)
    if len(findings) > _NUM_SHOWN:
        click.echo(f"and {len(findings) - _NUM_SHOWN} more")
    if findings:
        click.echo(f"{path}: {_described(view)}: {len(findings)} wrong")
        sys.exit(1)
    click.echo(f"{path}: {_described(view)}: each once, with its samples")


def _described(view: LedgerView) -> str:
    from varuna.morph.ledger import num_told

    order = view.order
    generations = len({entry.generation for entry in view.entries})
    begun = f" from step {order.first_step} on" if order.first_step else ""
    return (
        f"{_count(len(view.entries), 'step')}{begun} in {_count(generations, 'generation')}, batches of "
        f"{order.batch_size} from {order.dataset_length} samples, seed {order.seed}; workers have told all "
        f"samples of {_count(num_told(view.shares, order), 'step')}"
    )


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}{'' if number == 1 else 's'}"


def _journal(target: str) -> Path:
    """The journal's file that is meant.

    Raises:
        ConfigError: nothing fits.
    """
    from varuna.config import cache_dir
    from varuna.errors import ConfigError
    from varuna.morph.runs import JOURNAL_NAME, find_run

    if target and Path(target).is_dir():
        return _whole_or_not(Path(target) / JOURNAL_NAME)
    if target and Path(target).exists():
        return Path(target)
    if os.sep in target:
        raise ConfigError(f"There is no journal or folder {target!r}.")
    run = find_run(cache_dir(os.environ), target)
    if not run.journal:
        raise ConfigError(f"The journal of run {run.run_id} is on its manager's machine. Give its path there.")
    return _whole_or_not(Path(run.journal))


def _whole_or_not(path: Path) -> Path:
    """The journal, or the one that was set aside in its place."""
    from varuna.morph.runs import INCOMPLETE_NAME

    aside = path.with_name(INCOMPLETE_NAME)
    return aside if aside.exists() and not path.exists() else path
