"""The journal: a manager that dies at any moment is there again with its state, and the ledger is whole."""

from __future__ import annotations

import shutil
import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.morph.histories import play
from tests.morph.world import World
from tests.morph.world_parts import BATCH_SIZE, DESCRIBED, planner
from varuna.errors import ConfigError, PlanError
from varuna.morph import journal as journal_module
from varuna.morph.instructions import StepsCommitted, StepsUndone
from varuna.morph.journal import Journal, ResumedClock
from varuna.morph.ledger import audit
from varuna.morph.ledger_table import read_ledger
from varuna.morph.messages import Beat, Described, Ready, StepDone, WorkerStarted
from varuna.morph.phases import Phase
from varuna.morph.planning import Planned
from varuna.morph.runs import INCOMPLETE_NAME

PLAN_FOR = planner(1, (2, 1, 3))


class FixedClock:
    def __init__(self, now_s: float) -> None:
        self.seconds = now_s

    def now_s(self) -> float:
        return self.seconds


def check_same(world: World, path: Path) -> None:
    """A second manager, from the file as it is on disk now, has the state of the first, and the same ledger."""
    assert world.journal is not None
    copy = path.with_name("copy")
    copy.mkdir(exist_ok=True)
    for file in path.parent.glob(path.name + "*"):
        shutil.copy(file, copy / file.name)  # what a crash leaves: file and write-ahead log, nobody closed them
    again = Journal(copy / path.name)
    try:
        restored = again.restore(world.plan_for, world.policy)
        assert restored.manager.job == world.manager.job
        assert [entry.generation for entry in again.ledger()] == world.ledger
        assert again.ledger() == world.journal.ledger()
        order = again.order()
        if world.ledger:
            assert order is not None
            view = read_ledger(again.path)
            assert audit(view.entries, order, len(world.ledger), view.shares) == ()
    finally:
        again.close()
        shutil.rmtree(copy)


@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    choices=st.lists(st.integers(0, 10_000), max_size=200),
    more=st.lists(st.integers(0, 10_000), max_size=100),
    rarity=st.integers(8, 30),
    every=st.sampled_from([3, 10, 10_000]),
)
def test_any_history_is_restored(
    tmp_path_factory: pytest.TempPathFactory, choices: list[int], more: list[int], rarity: int, every: int
) -> None:
    path = tmp_path_factory.mktemp("journal") / "job.sqlite"
    journal = Journal(path)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(journal_module, "SNAPSHOT_EVERY", every)
        world = World(3, journal=journal)
        play(world, choices, rarity)
        check_same(world, path)
        play(world, more, rarity)
        world.drain()
        check_same(world, path)
    journal.close()


def test_a_crash_between_an_entry_and_what_follows_from_it(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.sqlite")
    world = World(2, journal=journal)
    while not world.ledger:
        world.actions()[0]()
    step = len(world.ledger)
    message = StepDone(generation=0, step_index=step, duration_s=1.0, busy_s=0.0, num_samples=BATCH_SIZE)
    assert world.manager.handle("w0", message, 1.0), "the step follows"
    journal.received("w0", message, 1.0)  # and then nobody hears of it
    journal.close()
    again = Journal(tmp_path / "job.sqlite")
    assert again.restore(PLAN_FOR).manager.job.num_committed == step + 1
    assert len(again.ledger()) == step + 1
    again.close()


def test_steps_that_are_undone_come_again(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.sqlite")
    journal.received("w0", DESCRIBED, 0.0)
    journal.follow((StepsCommitted(generation=0, first_step=0, end_step=3, num_samples=BATCH_SIZE),))
    journal.follow((StepsUndone(first_step=2), StepsCommitted(generation=4, first_step=2, end_step=4)))
    order = journal.order()
    assert order is not None
    assert [(entry.step_index, entry.generation) for entry in journal.ledger()] == [
        (0, 0),
        (1, 0),
        (2, 4),
        (3, 4),
    ]
    assert audit(journal.ledger(), order, 4) == ()
    journal.close()


def test_a_step_that_is_heard_of_before_the_job_is(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.sqlite")
    journal.follow((StepsCommitted(generation=0, first_step=0, end_step=1, num_samples=BATCH_SIZE),))
    assert journal.ledger() == ()
    journal.received("w0", DESCRIBED, 0.0)
    assert [entry.step_index for entry in journal.ledger()] == [0]
    journal.close()


def test_a_torn_last_write_is_left_out(tmp_path: Path) -> None:
    path, torn = tmp_path / "job.sqlite", tmp_path / "torn.sqlite"
    journal = Journal(path)
    for index in range(3):
        journal.received("m0", WorkerStarted(incarnation=f"w{index}", machine="m0", rank=index), float(index))
    log = Path(f"{path}-wal").read_bytes()
    shutil.copy(path, torn)
    Path(f"{torn}-wal").write_bytes(log[:-100])
    journal.close()
    again = Journal(torn)
    restored = again.restore(PLAN_FOR)
    assert list(restored.manager.job.workers) == ["w0", "w1"]
    assert restored.now_s == 1.0
    again.received("m0", WorkerStarted(incarnation="w2", machine="m0", rank=2), 5.0)
    again.close()


def test_an_empty_journal_begins_a_job(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "deep" / "job.sqlite")
    restored = journal.restore(PLAN_FOR)
    assert restored.manager.job.phase is Phase.FOUNDING
    assert restored.now_s == 0.0
    assert journal.order() is None
    assert journal.ledger() == ()
    assert (tmp_path / "deep" / "job.sqlite").stat().st_mode & 0o077 == 0, "others could read it"
    journal.close()


def test_heartbeats_are_not_written(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "job.sqlite")
    journal.received("w0", Beat(), 1.0)
    journal.received("w0", Ready(digest="d"), 2.0)
    journal.close()
    with sqlite3.connect(tmp_path / "job.sqlite") as database:
        rows = database.execute("SELECT sender, message FROM entries").fetchall()
    database.close()
    assert rows == [("w0", '{"type":"Ready","digest":"d","store_address":""}')]


def test_a_planner_that_changes_its_mind_is_asked_once(tmp_path: Path) -> None:
    """A profile may be refined, or be gone, when the manager is started again."""
    asked: list[int] = []

    def moody(num_workers: int, described: Described) -> Planned:
        asked.append(num_workers)
        if num_workers < 2:
            raise PlanError("too few")
        return planner(1, (1 + len(asked) % 2,))(num_workers, described)

    def restored() -> Callable[[int, Described], Planned]:
        journal = Journal(tmp_path / "job.sqlite")
        plan_for: Callable[[int, Described], Planned] = journal.restore(moody).manager._plan_for
        journal.close()
        return plan_for

    journal = Journal(tmp_path / "job.sqlite")
    first = journal.restore(moody).manager._plan_for
    plans = [first(3, DESCRIBED), first(2, DESCRIBED), first(3, DESCRIBED)]
    with pytest.raises(PlanError, match="too few"):
        first(1, DESCRIBED)
    journal.close()
    again = restored()
    assert [again(3, DESCRIBED), again(2, DESCRIBED), again(3, DESCRIBED)] == plans
    with pytest.raises(PlanError, match="too few"):
        again(1, DESCRIBED)
    assert asked == [3, 2, 1]


@pytest.mark.parametrize(
    "content", [b"no database, but a text that somebody left here" * 50, b"SQLite format 3\0"]
)
def test_what_is_no_journal_is_refused(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "job.sqlite"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=r"job\.sqlite"):
        Journal(path)
    assert path.read_bytes() == content


def test_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "job.sqlite"
    Journal(path).close()
    with sqlite3.connect(path) as database:
        database.execute("UPDATE about SET value = '99' WHERE key = 'version'")
    database.close()
    with pytest.raises(ConfigError, match="version 99; this Varuna reads version 2"):
        Journal(path)


def test_a_directory_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be opened"):
        Journal(tmp_path / "file" / "job.sqlite")


def test_a_full_disk_ends_the_journal_and_not_the_job(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    journal = Journal(path)
    journal.received("w0", DESCRIBED, 0.0)
    (num_pages,) = journal._database.execute("PRAGMA page_count").fetchone()
    journal._database.execute(f"PRAGMA max_page_count = {num_pages + 2}")
    for step in range(500):
        committed = StepsCommitted(
            generation=0, first_step=step, end_step=step + 1, num_samples=DESCRIBED.batch_size
        )
        journal.follow([committed])
        journal.ticked(float(step))
    assert "database or disk is full" in journal.problem
    assert not path.exists()
    view = read_ledger(tmp_path / INCOMPLETE_NAME)
    assert 0 < len(view.entries) < 500
    assert audit(view.entries, view.order, None, view.shares) == ()
    journal.close()
    with pytest.raises(ConfigError, match="is incomplete: it could not be written any more"):
        Journal(path)


def test_time_goes_on_where_it_was() -> None:
    clock = FixedClock(5.0)
    resumed = ResumedClock(clock, 100.0)
    assert resumed.now_s() == 100.0
    clock.seconds = 7.5
    assert resumed.now_s() == 102.5
    assert ResumedClock(clock, 3.0).now_s() == 7.5, "the same machine, still up"


def test_a_long_journal_stays_short(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The state takes the place of the entries that led to it."""
    monkeypatch.setattr(journal_module, "SNAPSHOT_EVERY", 20)
    path = tmp_path / "job.sqlite"
    journal = Journal(path)
    world = World(3, num_steps=60, journal=journal)
    world.drain()
    assert len(world.log) > 180
    check_same(world, path)
    journal.close()
    with sqlite3.connect(path) as database:
        ((count,),) = database.execute("SELECT COUNT(*) FROM entries")
    database.close()
    assert count <= 20
