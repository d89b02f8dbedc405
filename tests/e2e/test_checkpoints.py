"""Checkpoints of running jobs: written while workers die, gone back to, gone on from with another layout.

Whole commands and real processes; what is trained is what an undisturbed run trains.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from safetensors.torch import load_file

from tests.cases import jobs as cases
from tests.checkpoint.test_commit import _can_mount
from tests.e2e.conftest import Start
from tests.e2e.jobs import Warm
from tests.e2e.morphing import EXACT, NUM_STEPS, Run, fault, undisturbed
from varuna import cli
from varuna.checkpoint.find import open_save, saves_in
from varuna.checkpoint.store import open_store

Life = Callable[..., Run]


def saved_in(place: Path, every: int = 10, keep: int = 20) -> dict[str, str]:
    """The environment of a job with checkpoints."""
    return {
        "VARUNA_CHECKPOINT": str(place),
        "VARUNA_CHECKPOINT_EVERY": str(every),
        "VARUNA_CHECKPOINT_KEEP": str(keep),
    }


def complete_steps(place: Path) -> list[int]:
    """Steps of complete checkpoints, newest first."""
    store = open_store(str(place))
    return [order.step for order in saves_in(store) if open_save(store, order) is not None]


def command(*arguments: str) -> str:
    """What a `varuna` command prints."""
    done = CliRunner().invoke(cli.main, arguments)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.fixture
def life(jobs: Warm, tmp_path: Path, cache: Path) -> Iterator[Life]:
    """Starts one job after another, each in a directory of its own."""
    runs: list[Run] = []

    def start(**options: Any) -> Run:
        directory = tmp_path / f"life-{len(runs)}"
        directory.mkdir()
        runs.append(Run(jobs, directory, cache, **options))
        return runs[-1]

    yield start
    for run in runs:
        run.abandon()


# --- going back -----------------------------------------------------------------------------


def test_all_holders_of_a_section_are_killed_and_the_job_goes_back(start: Start, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    run = start(fault("kill", 2, "forward", 13), stages=4, limit=13, environ=saved_in(place))
    run.event("checkpoint", "step 10 is saved")
    run.limit(NUM_STEPS)
    run.event("going back", "back to step 10")
    run.ends_well()
    assert [step["index"] for step in run.steps(0)] == [*range(13), *range(10, NUM_STEPS)]
    assert run.steps_are_exact(goes_back=True) == set(range(NUM_STEPS))
    run.ledger_is_right()
    run.end_is_exact()
    assert complete_steps(place)[0] == NUM_STEPS


def test_one_is_killed_while_the_job_goes_back(start: Start, tmp_path: Path) -> None:
    """Worker 1 dies before it has met the others, who go back again; a newcomer takes part."""
    faults = [fault("kill", 2, "forward", 13), fault("kill", 1, "form", 10)]
    run = start(*faults, stages=4, limit=13, environ=saved_in(tmp_path / "saved"))
    run.event("checkpoint", "step 10 is saved")
    run.client.add_workers(1)
    run.event("ready")
    run.limit(NUM_STEPS)
    run.event("going back", "back to step 10")
    run.ends_well()
    assert run.steps_are_exact(goes_back=True) == set(range(NUM_STEPS))
    run.ledger_is_right()
    run.end_is_exact()


def test_newcomers_alone_go_on_with_the_numbers_of_saves(start: Start, tmp_path: Path) -> None:
    """Nobody is left who knew them: what is saved later still counts as newer."""
    place = tmp_path / "saved"
    run = start(stages=2, workers=2, limit=13, environ=saved_in(place))
    run.event("checkpoint", "step 10 is saved")
    run.client.add_workers(2)
    for _ in range(2):
        run.event("ready")
    run.steps_done(13)  # the members wait in their scripts
    for member in [run.worker(number) for number in range(2)]:
        member.kill()
    run.event("going back", "back to step 10")
    run.limit(NUM_STEPS)
    run.ends_well()
    assert run.steps_are_exact(goes_back=True) == set(range(NUM_STEPS))
    run.ledger_is_right()
    run.end_is_exact()
    orders = saves_in(open_store(str(place)))  # newest first
    assert [order.step for order in orders] == list(range(NUM_STEPS, 0, -10))
    assert [order.sequence for order in orders] == list(range(len(orders), 0, -1))


# --- dying in the middle of a save ----------------------------------------------------------


@pytest.mark.parametrize(("worker", "point"), [(3, "save"), (0, "save"), (0, "manifest")])
def test_a_worker_is_killed_in_a_save_and_others_complete_it(
    start: Start, tmp_path: Path, worker: int, point: Any
) -> None:
    """Two pipelines: what the dead one owed has been kept by its replica; the first survivor commits."""
    place = tmp_path / "saved"
    run = start(fault("kill", worker, point), limit=8, environ=saved_in(place))
    run.steps_done(8)
    run.limit(NUM_STEPS)
    run.ends_well()
    run.is_exact()
    found = complete_steps(place)
    assert (found[0], found[-1]) == (NUM_STEPS, 10)
    assert "ok" in command("checkpoint", "verify", str(place), "--step", "10")
    (first,) = place.glob("step-000000010-*")
    assert list(first.glob("*-kept*.safetensors"))
    assert len(list(place.iterdir())) == len(found)
    assert not list(place.glob("*/.writing"))


def test_the_last_holder_is_killed_in_a_save_which_is_given_up(start: Start, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    run = start(stages=4, limit=7, environ=saved_in(place, every=5))
    run.event("checkpoint", "step 5 is saved")
    run.add(fault("kill", 2, "save"))
    run.limit(NUM_STEPS)
    run.event("going back", "back to step 5")
    run.ends_well()
    assert run.steps_are_exact(goes_back=True) == set(range(NUM_STEPS))
    run.ledger_is_right()
    run.end_is_exact()
    found = complete_steps(place)
    assert (found[0], found[-1]) == (NUM_STEPS, 5)
    assert len(list(place.iterdir())) == len(found), "nothing is left of what was given up"


# --- another job goes on --------------------------------------------------------------------


def test_killed_and_started_again_with_other_layouts(life: Life, tmp_path: Path) -> None:
    """1 x 4, then 2 x 2, 4 x 1 and 3 x 1: each goes on where the one before was saved last."""
    place = tmp_path / "saved"
    environ = saved_in(place)
    seen: set[int] = set()
    for number, (stages, workers) in enumerate([(1, 4), (2, 4), (4, 4)]):
        run = life(stages=stages, workers=workers, limit=10 * number + 12, environ=environ)
        run.event("checkpoint", f"step {10 * number + 10} is saved")
        run.abandon()
        assert run.steps(0)[0]["index"] == 10 * number
        seen |= run.steps_are_exact()
    run = life(stages=3, workers=3, environ=environ)
    run.ends_well()
    assert run.steps(0)[0]["index"] == 30
    assert seen | run.steps_are_exact() == set(range(NUM_STEPS))
    run.ledger_is_right(first_step=30)
    run.end_is_exact()
    command("checkpoint", "export", str(place), str(tmp_path / "model.safetensors"))
    exported, (state, _) = load_file(tmp_path / "model.safetensors"), undisturbed()
    trained = cases.decode(json.loads((run.directory / "state.json").read_text()))
    assert exported.keys() == state.keys()
    for name, value in exported.items():
        assert value.equal(trained[name])
        assert (value - state[name]).abs().max() <= EXACT * state[name].abs().max()


# --- places that fail -----------------------------------------------------------------------


def test_a_place_that_fails_stops_no_training_and_is_told(start: Start, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    run = start(limit=12, environ=saved_in(place), arguments=["tells"])
    run.event("checkpoint", "step 10 is saved")
    shutil.rmtree(place)
    place.write_text("in the way")
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    run.is_exact()
    assert "Checkpoint: step 10, " in ended.stderr
    notes = [line for line in ended.stderr.splitlines() if line.startswith("Note: no checkpoint")]
    assert notes[0].startswith(f"Note: no checkpoint of step 20: A save cannot begin in {place}: "), notes
    assert notes[0].endswith("'. Training goes on; older checkpoints stay."), notes


@pytest.mark.skipif(not _can_mount(), reason="needs to mount a small file system")
def test_c50_a_full_disk_stops_no_training_and_is_told(start: Start, tmp_path: Path) -> None:
    place = tmp_path / "saved"
    place.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "tmpfs", str(place)], check=True)
    try:
        run = start(environ=saved_in(place), arguments=["tells"])
        ended = run.ends_well()
        run.is_exact()
        assert "No space left on device" in ended.stderr
        found = complete_steps(place)
        assert found
        assert len(found) < 4
        command("checkpoint", "verify", str(place))
    finally:
        subprocess.run(["umount", str(place)], check=True)
