"""``varuna audit`` on journals with which somebody has tampered."""

from __future__ import annotations

import sqlite3
from collections.abc import Callable
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from varuna import cli
from varuna.generations import SampleShare
from varuna.morph.instructions import Instruction, SamplesTold, StepsCommitted, StepsUndone
from varuna.morph.journal import Journal
from varuna.morph.messages import Described
from varuna.morph.runs import INCOMPLETE_NAME
from varuna.order import digest_of, sample_ids

DESCRIBED = Described(sections=(), batch_size=8, dataset_length=37, seed=5)


def told(step: int, first: int, end: int) -> SamplesTold:
    ids = sample_ids(step, 37, 8, 5)[first:end]
    return SamplesTold(step_index=step, samples=SampleShare(first=first, end=end, digest=digest_of(ids)))


def happened(step: int, *, generation: int = 0, num_samples: int = 8) -> list[Instruction]:
    """A step of two pipelines."""
    committed = StepsCommitted(
        generation=generation, first_step=step, end_step=step + 1, num_samples=num_samples
    )
    return [committed, told(step, 0, 5), told(step, 5, 8)]


@pytest.fixture
def journal(tmp_path: Path) -> Path:
    """Of six steps; from step 3 on they were begun anew once."""
    path = tmp_path / "journal.sqlite"
    made = Journal(path)
    made.received("w0", DESCRIBED, 0.0)
    for step in range(5):
        made.follow(happened(step))
    made.follow([StepsUndone(first_step=3)])
    for step in range(3, 6):
        made.follow(happened(step, generation=2))
    made.close()
    return path


def audit(*arguments: object) -> Result:
    return CliRunner().invoke(cli.main, ["audit", *map(str, arguments)])


def test_as_it_should_be(journal: Path) -> None:
    for target in (journal, journal.parent):
        done = audit(target)
        assert done.exit_code == 0
        assert done.output == (
            f"{journal}: 6 steps in 2 generations, batches of 8 from 37 samples, seed 5; workers have told all "
            f"samples of 6 steps: each once, with its samples\n"
        )
    assert audit(journal, "--steps", 6).exit_code == 0


def test_fewer_steps_than_there_should_be(journal: Path) -> None:
    done = audit(journal, "--steps", 7)
    assert done.exit_code == 1
    assert done.output.splitlines()[0] == "the ledger ends after step 5; there should be 7 steps"
    assert done.output.endswith(": 1 wrong\n")


TAMPERED = [
    ("DELETE FROM ledger WHERE step_index = 2", "step 2 is missing"),
    ("DELETE FROM ledger WHERE step_index >= 4", "workers read samples for step 4, which is not in "),
    ("UPDATE ledger SET num_samples = 7 WHERE step_index = 1", "step 1 counted 7 samples instead of 8"),
    (
        "UPDATE ledger SET digest = 'x' WHERE step_index = 1",
        "step 1 used other samples than an undisturbed run",
    ),
    ("UPDATE ledger SET link = 'x' WHERE step_index = 1", "the entry of step 2 does not follow from those"),
    ("UPDATE ledger SET generation = 3 WHERE step_index = 2", "step 3 is of generation 2, after one of "),
    (
        "UPDATE shares SET digest = 'x' WHERE step_index = 4 AND first = 5",
        "step 4 read other samples than an undisturbed run would at positions 5 to 7 of its batch",
    ),
    (
        "INSERT INTO shares SELECT 4, 3, 5, digest FROM shares WHERE step_index = 4 AND first = 0",
        "step 4 used samples twice: positions 3 to 4 of its batch overlap others",
    ),
    (
        "UPDATE shares SET end = 9 WHERE step_index = 0 AND first = 5",
        "step 0 has no positions 5 to 8 of its batch",
    ),
    (
        """UPDATE about SET value = '{"dataset_length":37,"batch_size":8,"seed":6}' WHERE key = 'order'""",
        "step 0 used other samples than an undisturbed run would",
    ),
]


@pytest.mark.parametrize(("statement", "text"), TAMPERED)
def test_tampered_with(journal: Path, statement: str, text: str) -> None:
    with sqlite3.connect(journal) as database:
        assert database.execute(statement).rowcount >= 1
    database.close()
    done = audit(journal)
    assert done.exit_code == 1
    assert text in done.output
    assert " wrong\n" in done.output


def test_what_a_lost_worker_could_not_tell_is_missing_and_no_finding(journal: Path) -> None:
    with sqlite3.connect(journal) as database:
        database.execute("DELETE FROM shares WHERE step_index = 2 AND first = 0")
    database.close()
    done = audit(journal)
    assert done.exit_code == 0
    assert "workers have told all samples of 5 steps" in done.output


def test_many_findings_are_not_all_shown(journal: Path) -> None:
    with sqlite3.connect(journal) as database:
        database.execute("UPDATE ledger SET num_samples = 7, digest = 'x', link = 'y'")
        database.execute("UPDATE shares SET digest = 'x'")
    database.close()
    done = audit(journal)
    assert done.exit_code == 1
    assert len(done.output.splitlines()) == 22
    assert done.output.splitlines()[20].startswith("and ")


def _no_sqlite(path: Path) -> None:
    path.write_bytes(b"no database at all" * 100)


def _no_tables(path: Path) -> None:
    path.unlink()
    sqlite3.connect(path).close()


def _no_order(path: Path) -> None:
    with sqlite3.connect(path) as database:
        database.execute("DELETE FROM about WHERE key = 'order'")
    database.close()


@pytest.mark.parametrize("damage", [Path.unlink, _no_sqlite, _no_tables, _no_order])
def test_no_journal(journal: Path, damage: Callable[[Path], None]) -> None:
    damage(journal)
    done = audit(journal.parent)
    assert done.exit_code == 2
    assert "journal" in done.output


def test_a_run_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("VARUNA_CACHE_DIR", str(tmp_path))
    assert audit("no-run").exit_code == 2
    done = audit(tmp_path / "elsewhere" / "journal.sqlite")
    assert done.exit_code == 2
    assert "There is no journal or folder" in done.output


def test_reading_leaves_the_file_as_it_is(journal: Path) -> None:
    before = journal.read_bytes()
    journal.chmod(0o400)
    assert audit(journal).exit_code == 0
    assert journal.read_bytes() == before
    assert sorted(path.name for path in journal.parent.iterdir()) == ["journal.sqlite"]


def test_a_journal_that_was_set_aside_is_not_as_it_should_be(journal: Path) -> None:
    aside = journal.rename(journal.with_name(INCOMPLETE_NAME))
    done = audit(journal.parent)
    assert done.exit_code == 1
    assert done.output.startswith(
        "The journal could not be written any more; what happened after that is not known."
    )
    assert f"{aside}: 6 steps in 2 generations" in done.output
