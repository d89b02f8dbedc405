"""The ledger on disk: tables of the manager's journal, which `varuna audit` reads while it is written."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

import msgspec

from varuna.errors import ConfigError
from varuna.morph.instructions import Instruction, SamplesTold, StepsCommitted, StepsUndone
from varuna.morph.ledger import LedgerEntry, SampleOrder, ToldShare, next_entry

LEDGER_SCHEMA = """
CREATE TABLE IF NOT EXISTS about (key TEXT PRIMARY KEY, value TEXT NOT NULL) STRICT;
CREATE TABLE IF NOT EXISTS ledger (
    step_index INTEGER PRIMARY KEY, generation INTEGER NOT NULL, num_samples INTEGER NOT NULL,
    digest TEXT NOT NULL, link TEXT NOT NULL
) STRICT;
CREATE TABLE IF NOT EXISTS shares (
    step_index INTEGER NOT NULL, first INTEGER NOT NULL, end INTEGER NOT NULL, digest TEXT NOT NULL,
    PRIMARY KEY (step_index, first)
) STRICT, WITHOUT ROWID;
"""

_ENTRY = "step_index, generation, num_samples, digest, link"


class LedgerTable:
    """Writes the ledger of one job.

    Args:
        database: with the tables of ``LEDGER_SCHEMA``; transactions are the caller's.
    """

    def __init__(self, database: sqlite3.Connection) -> None:
        self._database = database
        self._order: SampleOrder | None = None
        self._pending: list[Instruction] = []

    @property
    def knows_order(self) -> bool:
        """Whether it is known what the job is; until then what is to be written waits."""
        return self._order is not None

    def set_order(self, order: SampleOrder) -> None:
        """What the job is. Writes what has waited for it."""
        self._order = order
        text = msgspec.json.encode(order).decode()
        self._database.execute("INSERT OR REPLACE INTO about VALUES ('order', ?)", (text,))
        pending, self._pending = self._pending, []
        self.follow(pending)

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """Write down what follows from a decision. Idempotent: steps that are there stay as they are."""
        for instruction in instructions:
            if not isinstance(instruction, StepsCommitted | StepsUndone | SamplesTold):
                continue
            if self._order is None:  # a step was heard of before what the job is
                self._pending.append(instruction)
            elif isinstance(instruction, StepsUndone):
                for table in ("ledger", "shares"):
                    self._database.execute(
                        f"DELETE FROM {table} WHERE step_index >= ?", (instruction.first_step,)
                    )
            elif isinstance(instruction, SamplesTold):
                share = instruction.samples
                row = (instruction.step_index, share.first, share.end, share.digest)
                self._database.execute("INSERT OR REPLACE INTO shares VALUES (?, ?, ?, ?)", row)
            else:
                self._write_steps(instruction, self._order)

    def _write_steps(self, steps: StepsCommitted, order: SampleOrder) -> None:
        row = self._database.execute(f"SELECT {_ENTRY} FROM ledger ORDER BY step_index DESC LIMIT 1").fetchone()
        before = None if row is None else _entry(row)
        first = order.first_step if before is None else before.step_index + 1
        for step in range(first, steps.end_step):
            count = order.batch_size if steps.num_samples is None else steps.num_samples
            before = next_entry(before, step, steps.generation, count, order)
            self._database.execute(
                "INSERT INTO ledger VALUES (?, ?, ?, ?, ?)",
                (step, before.generation, before.num_samples, before.digest, before.link),
            )


@dataclass(frozen=True, kw_only=True)
class LedgerView:
    """The ledger of a job as it was at one moment.

    Attributes:
        order: which samples the job's steps use.
        entries: of steps that have happened.
        shares: what workers have told of the samples that they have read.
    """

    order: SampleOrder
    entries: tuple[LedgerEntry, ...]
    shares: tuple[ToldShare, ...]


def order_in(database: sqlite3.Connection) -> SampleOrder | None:
    """What the job is; None before that was told."""
    found = database.execute("SELECT value FROM about WHERE key = 'order'").fetchone()
    return None if found is None else msgspec.json.decode(found[0], type=SampleOrder)


def entries_in(database: sqlite3.Connection) -> tuple[LedgerEntry, ...]:
    """All steps that have happened, in the order in which they were written."""
    return tuple(map(_entry, database.execute(f"SELECT {_ENTRY} FROM ledger ORDER BY rowid")))


def shares_in(database: sqlite3.Connection) -> tuple[ToldShare, ...]:
    """What workers have told, by step and position."""
    rows = database.execute("SELECT step_index, first, end, digest FROM shares ORDER BY step_index, first")
    return tuple(
        ToldShare(step_index=step, first=first, end=end, digest=digest) for step, first, end, digest in rows
    )


def read_ledger(journal: Path) -> LedgerView:
    """The ledger in a journal's file; a manager may be writing it meanwhile, nothing is changed.

    Raises:
        ConfigError: there is no such file, it is no journal, or its job has not begun.
    """
    if not journal.is_file():
        raise ConfigError(f"There is no journal {journal}.")
    try:
        with _reading(journal) as database:
            order, entries, shares = order_in(database), entries_in(database), shares_in(database)
    except (sqlite3.Error, msgspec.DecodeError, TypeError) as error:
        raise ConfigError(f"{journal} is no journal of a job, or is damaged: {error}.") from error
    if order is None:
        raise ConfigError(
            f"{journal} does not say what the job is: it has not begun, or the journal is damaged."
        )
    return LedgerView(order=order, entries=entries, shares=shares)


@contextmanager
def _reading(path: Path) -> Iterator[sqlite3.Connection]:
    """All that is read inside is of one moment."""
    is_closed = not path.with_name(
        f"{path.name}-wal"
    ).exists()  # then nobody writes, and no file has to be made
    query = "immutable=1" if is_closed else "mode=ro"
    with closing(sqlite3.connect(f"{path.absolute().as_uri()}?{query}", uri=True)) as database:
        database.execute("BEGIN")
        yield database


def _entry(row: tuple[int, int, int, str, str]) -> LedgerEntry:
    step, generation, num_samples, digest, link = row
    return LedgerEntry(
        step_index=step, generation=generation, num_samples=num_samples, digest=digest, link=link
    )
