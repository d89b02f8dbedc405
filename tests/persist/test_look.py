"""Newcomers, and those that go back, tell the newest checkpoint there is: it may be news to the manager."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any, cast

import pytest

from tests.checkpoint.state import save, train, trained
from varuna.checkpoint.errors import DamagedCheckpoint
from varuna.checkpoint.find import saves_in
from varuna.checkpoint.store import open_store
from varuna.checkpoint.values import SaveOrder
from varuna.config_checkpoint import CheckpointConfig
from varuna.persist.checkpoints import Checkpoints

UNUSED = cast(Any, None)


@pytest.fixture
def orders(tmp_path: Path) -> tuple[SaveOrder, ...]:
    """Of checkpoints of steps 1, 2 and 3 in ``tmp_path``; newest first."""
    state, store = trained(1), open_store(str(tmp_path))
    for _ in range(3):
        save(store, state, 2, 1)
        train(state, 1)
    return saves_in(store)


def worker(place: Path) -> tuple[Checkpoints, list[tuple[SaveOrder, str, bool]]]:
    """A worker that has not begun, and what it tells."""
    told: list[tuple[SaveOrder, str, bool]] = []
    checkpoints = Checkpoints(
        CheckpointConfig(url=str(place)),
        UNUSED,
        UNUSED,
        publish=UNUSED,
        complete=lambda *checkpoint: told.append(checkpoint),
        name="w0",
    )
    return checkpoints, told


def test_a_newcomer_tells_what_it_finds(orders: tuple[SaveOrder, ...], tmp_path: Path) -> None:
    checkpoints, told = worker(tmp_path)
    assert checkpoints.look()
    assert told == [(orders[0], f"{tmp_path}/{orders[0].directory}", True)]


def test_nothing_is_told_of_an_empty_place(tmp_path: Path) -> None:
    checkpoints, told = worker(tmp_path / "none")
    assert not checkpoints.look()
    assert not told


def test_whoever_goes_back_tells_of_a_newer_one_once(orders: tuple[SaveOrder, ...], tmp_path: Path) -> None:
    """The one that the manager knew has been removed; if it insists, that is an error."""
    newest, older, _ = orders
    shutil.rmtree(tmp_path / older.directory)
    checkpoints, told = worker(tmp_path)
    address = f"{tmp_path}/{older.directory}"
    assert not checkpoints.go_back(address, UNUSED)
    assert [order for order, _, _ in told] == [newest]
    with pytest.raises(DamagedCheckpoint, match="it was removed, or the others write elsewhere"):
        checkpoints.go_back(address, UNUSED)
    assert len(told) == 1


def test_whoever_goes_back_to_the_newest_tells_nothing(orders: tuple[SaveOrder, ...], tmp_path: Path) -> None:
    checkpoints, told = worker(tmp_path)
    (tmp_path / orders[0].directory / "manifest.json").unlink()
    with pytest.raises(DamagedCheckpoint):
        checkpoints.go_back(f"{tmp_path}/{orders[0].directory}", UNUSED)
    assert not told
