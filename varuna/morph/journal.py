"""The manager's journal: everything it was told, on disk, so that it can be started again and go on.

One SQLite file (write-ahead log: a write that was torn by a crash is left out, the ones before it are whole).
It has, in the order of their arrival, all messages but heartbeats, with sender and time; the plans that were
made, since the planner may answer differently later; now and then the manager's whole state, so that what came
before can be dropped; and the ledger. The state is a pure function of the rest: ``restore`` computes it again.

A file that cannot be written any more (a full disk) ends the journal and not the job: it is set aside under
``runs.INCOMPLETE_NAME``, nothing more is written, and no manager begins from it.

No secret is ever in it: messages have none.
"""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import msgspec

from varuna.clock import Clock
from varuna.errors import ConfigError, PlanError, UserError
from varuna.morph.instructions import Instruction
from varuna.morph.ledger import LedgerEntry, SampleOrder
from varuna.morph.ledger_table import LEDGER_SCHEMA, LedgerTable, entries_in, order_in
from varuna.morph.messages import Beat, Described, FromAgent, FromWatch, FromWorker, encode
from varuna.morph.planning import PlanFor, Planned
from varuna.morph.policy import Policy
from varuna.morph.record import JobRecord
from varuna.morph.runs import INCOMPLETE_NAME
from varuna.morph.state import Manager

SCHEMA_VERSION = 2
"""Version of the tables and messages; a file of another version is refused."""

SNAPSHOT_EVERY = 2000
"""Entries after which the whole state is written and they are dropped."""

_SCHEMA = """
CREATE TABLE IF NOT EXISTS entries (
    number INTEGER PRIMARY KEY AUTOINCREMENT, at_s REAL NOT NULL, sender TEXT NOT NULL, message TEXT
) STRICT;
CREATE TABLE IF NOT EXISTS plans (
    num_workers INTEGER PRIMARY KEY, planned TEXT, refusal TEXT NOT NULL DEFAULT ''
) STRICT;
"""

_message = msgspec.json.Decoder(FromWorker | FromAgent | FromWatch)


class _Snapshot(msgspec.Struct, frozen=True, kw_only=True):
    """The state after some entries."""

    number: int
    at_s: float
    job: JobRecord


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a journal says.

    Attributes:
        manager: with the state that it had.
        now_s: of its clock, when it was last told something; 0 if there is nothing yet.
    """

    manager: Manager
    now_s: float


class Journal:
    """One job's journal, for one manager at a time; used from one thread.

    Args:
        path: of the file; made if it is not there, readable by its owner only.

    Attributes:
        problem: why nothing is written any more, for people; empty while all is well.

    Raises:
        ConfigError: it cannot be opened, is no journal, or is one of another version.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.problem = ""
        self._manager: Manager | None = None
        self._num_since_snapshot = 0
        aside = self.path.with_name(INCOMPLETE_NAME)
        if aside.exists() and not self.path.exists():
            raise ConfigError(
                f"The journal {aside} is incomplete: it could not be written any more, perhaps for a full "
                f"disk, and no manager can go on from it. Move it away to begin a new job, from a checkpoint "
                f"if there is one."
            )
        try:
            self.path.parent.mkdir(parents=True, exist_ok=True)
            os.close(os.open(self.path, os.O_CREAT | os.O_RDWR, 0o600))
            self._database = sqlite3.connect(self.path, isolation_level=None)
        except (OSError, sqlite3.Error) as error:
            raise ConfigError(f"The journal {self.path} cannot be opened: {error}.") from error
        self._table = LedgerTable(self._database)
        try:
            self._prepare()
        except sqlite3.Error as error:
            self._database.close()
            raise ConfigError(
                f"{self.path} is no journal of a job, or is damaged: {error}. Move it away to begin a new job."
            ) from error
        except ConfigError:
            self._database.close()
            raise

    def close(self) -> None:
        """Close the file."""
        self._database.close()

    # --- what the manager's shell tells -----------------------------------------------------

    def received(self, sender: str, message: FromWorker | FromAgent | FromWatch, now_s: float) -> None:
        """The manager has handled a message; nobody has heard yet what follows."""
        if not isinstance(message, Beat):
            self._write(lambda: self._write_message(sender, message, now_s))

    def ticked(self, now_s: float) -> None:
        """The manager was told the time, and something follows from it."""
        self._write(lambda: self._add("", None, now_s))

    def follow(self, instructions: Sequence[Instruction]) -> None:
        """What follows from the last entry."""
        self._write(lambda: self._write_consequences(instructions))

    # --- and what it hears ------------------------------------------------------------------

    def restore(self, plan_for: PlanFor, policy: Policy | None = None) -> Restored:
        """The manager with the state that this journal leads to; plans are asked for, and remembered, here."""
        remembered = self._remembering(plan_for)
        found = self._about("snapshot")
        snapshot = None if found is None else msgspec.json.decode(found, type=_Snapshot)
        number = 0 if snapshot is None else snapshot.number
        now_s = 0.0 if snapshot is None else snapshot.at_s
        manager = Manager(remembered, policy=policy, job=None if snapshot is None else snapshot.job)
        self._manager = manager
        if manager.job.description is not None:
            self._table.set_order(_order_of(manager.job.description))
        last: tuple[Instruction, ...] = ()
        followed: list[Instruction] = []
        rows = self._database.execute(
            "SELECT at_s, sender, message FROM entries WHERE number > ? ORDER BY number", (number,)
        ).fetchall()
        for now_s, sender, text in rows:
            if text is None:
                last = manager.tick(now_s)
            else:
                message = _message.decode(text)
                if isinstance(message, Described) and not self._table.knows_order:
                    self._table.set_order(_order_of(message))
                last = manager.handle(sender, message, now_s)
            followed += last
        self._num_since_snapshot = len(rows)
        (newest,) = self._database.execute("SELECT MAX(step_index) FROM ledger").fetchone()
        is_whole = newest is not None and newest + 1 == manager.job.num_committed
        # the crash may have come between an entry and what follows from it
        self._write(lambda: self._write_consequences(last if is_whole else followed))
        return Restored(manager=manager, now_s=now_s)

    def ledger(self) -> tuple[LedgerEntry, ...]:
        """All steps that have happened, in their order."""
        return entries_in(self._database)

    def order(self) -> SampleOrder | None:
        """Which samples the job's steps use; None before the job has described itself."""
        return order_in(self._database)

    # --- the file ---------------------------------------------------------------------------

    def _write(self, work: Callable[[], object]) -> None:
        """Do it, if the file can still be written."""
        if self.problem:
            return
        try:
            work()
        except sqlite3.Error as error:
            self._set_aside(error)

    def _set_aside(self, error: sqlite3.Error) -> None:
        with contextlib.suppress(sqlite3.Error):
            self._database.close()
        aside = self.path.with_name(INCOMPLETE_NAME)
        for ending in ("", "-wal", "-shm"):
            with contextlib.suppress(OSError):  # this one is not there
                self.path.with_name(self.path.name + ending).rename(aside.with_name(aside.name + ending))
        self.problem = (
            f"the journal cannot be written any more ({error}) and is set aside as {aside}: the job goes on, "
            f"but a manager that ends now cannot be started again"
        )

    def _write_message(self, sender: str, message: FromWorker | FromAgent | FromWatch, now_s: float) -> None:
        self._add(sender, encode(message).decode(), now_s)
        if isinstance(message, Described) and not self._table.knows_order:
            with self._database:
                self._database.execute("BEGIN")
                self._table.set_order(_order_of(message))

    def _write_consequences(self, instructions: Sequence[Instruction]) -> None:
        with self._database:
            self._database.execute("BEGIN")
            self._table.follow(instructions)
        if self._num_since_snapshot >= SNAPSHOT_EVERY and self._manager is not None:
            self._write_snapshot(self._manager.job)

    def _prepare(self) -> None:
        self._database.execute("PRAGMA journal_mode = WAL")
        self._database.execute("PRAGMA synchronous = NORMAL")
        self._database.executescript(LEDGER_SCHEMA + _SCHEMA)
        found = self._about("version")
        if found is None:
            self._set_about("version", str(SCHEMA_VERSION))
        elif found != str(SCHEMA_VERSION):
            raise ConfigError(
                f"{self.path} is a journal of version {found}; this Varuna reads version {SCHEMA_VERSION}. "
                f"Go on with the Varuna that wrote it, or move it away to begin a new job."
            )

    def _about(self, key: str) -> str | None:
        row = self._database.execute("SELECT value FROM about WHERE key = ?", (key,)).fetchone()
        return None if row is None else str(row[0])

    def _set_about(self, key: str, value: str) -> None:
        self._database.execute("INSERT OR REPLACE INTO about VALUES (?, ?)", (key, value))

    def _add(self, sender: str, message: str | None, now_s: float) -> None:
        self._database.execute(
            "INSERT INTO entries (at_s, sender, message) VALUES (?, ?, ?)", (now_s, sender, message)
        )
        self._num_since_snapshot += 1

    def _write_snapshot(self, job: JobRecord) -> None:
        number, at_s = self._database.execute(
            "SELECT number, at_s FROM entries ORDER BY number DESC LIMIT 1"
        ).fetchone()
        text = msgspec.json.encode(_Snapshot(number=number, at_s=at_s, job=job)).decode()
        with self._database:
            self._database.execute("BEGIN")
            self._set_about("snapshot", text)
            self._database.execute("DELETE FROM entries WHERE number <= ?", (number,))
        self._num_since_snapshot = 0

    # --- plans ------------------------------------------------------------------------------

    def _remembering(self, plan_for: PlanFor) -> PlanFor:
        """Each number of workers gets its plan once; refusals are remembered too."""
        known: dict[int, Planned | PlanError] = {}
        rows = self._database.execute("SELECT num_workers, planned, refusal FROM plans")
        for num_workers, planned, refusal in rows:
            if planned is None:
                known[num_workers] = PlanError(refusal)
            else:
                known[num_workers] = msgspec.json.decode(planned, type=Planned)

        def remembering(num_workers: int, described: Described) -> Planned:
            if num_workers not in known:
                known[num_workers] = self._ask(plan_for, num_workers, described)
            answer = known[num_workers]
            if isinstance(answer, PlanError):
                raise PlanError(str(answer))
            return answer

        return remembering

    def _ask(self, plan_for: PlanFor, num_workers: int, described: Described) -> Planned | PlanError:
        try:
            planned = plan_for(num_workers, described)
        except UserError as error:
            self._remember(num_workers, None, str(error))
            return PlanError(str(error))
        self._remember(num_workers, msgspec.json.encode(planned).decode(), "")
        return planned

    def _remember(self, num_workers: int, planned: str | None, refusal: str) -> None:
        row = (num_workers, planned, refusal)
        self._write(lambda: self._database.execute("INSERT INTO plans VALUES (?, ?, ?)", row))


class ResumedClock:
    """A clock that never shows less than ``least_s``: a machine that was started again counts from 0.

    Args:
        clock: the machine's.
        least_s: the last time that a journal has.
    """

    def __init__(self, clock: Clock, least_s: float) -> None:
        self._clock = clock
        self._offset_s = max(0.0, least_s - clock.now_s())

    def now_s(self) -> float:
        """Seconds, as ``Clock`` has them."""
        return self._clock.now_s() + self._offset_s


def _order_of(described: Described) -> SampleOrder:
    return SampleOrder(
        dataset_length=described.dataset_length,
        batch_size=described.batch_size,
        seed=described.seed,
        first_step=described.first_step,
    )
