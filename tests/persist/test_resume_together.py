"""Workers that begin from a checkpoint: all from the same one, whatever each can see and read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from torch.distributed import HashStore

from tests.checkpoint.state import save, train, trained
from varuna.checkpoint.errors import CheckpointError, DamagedCheckpoint
from varuna.checkpoint.find import Checkpoint
from varuna.checkpoint.store import open_store
from varuna.config_checkpoint import CheckpointConfig
from varuna.events import Event, Notice
from varuna.persist.resume import begin_from
from varuna.run.groups import World

NUM_WORKERS = 3


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """A directory with checkpoints of steps 1, 2 and 3."""
    directory = tmp_path / "shared"
    state, store = trained(1), open_store(str(directory))
    for _ in range(3):
        save(store, state, 2, 1)
        train(state, 1)
    return directory


def begin(
    roots: list[Path], use: Callable[[int, Checkpoint], None]
) -> tuple[list[int | None], list[list[Event]]]:
    """Step from which each worker begins, and what each was told."""
    meeting = HashStore()
    told: list[list[Event]] = [[] for _ in roots]

    def one(rank: int) -> int | None:
        beginning = begin_from(
            open_store(str(roots[rank])),
            CheckpointConfig(url=str(roots[rank])),
            World(rank=rank, size=len(roots), store=meeting),
            use=lambda checkpoint: use(rank, checkpoint),
            publish=told[rank].append,
        )
        return None if beginning.checkpoint is None else beginning.checkpoint.step

    with ThreadPoolExecutor(len(roots)) as pool:
        return list(pool.map(one, range(len(roots)))), told


def test_c43_all_begin_from_the_newest(root: Path) -> None:
    used: list[tuple[int, int]] = []
    steps, told = begin([root] * NUM_WORKERS, lambda rank, checkpoint: used.append((rank, checkpoint.step)))
    assert steps == [3, 3, 3]
    assert sorted(used) == [(0, 3), (1, 3), (2, 3)]
    assert told == [[], [], []]


def test_c43_what_one_cannot_read_nobody_begins_from(root: Path) -> None:
    def use(rank: int, checkpoint: Checkpoint) -> None:
        if (rank, checkpoint.step) in ((2, 3), (1, 2)):
            raise DamagedCheckpoint(f"worker {rank} finds a flipped byte")

    steps, told = begin([root] * NUM_WORKERS, use)
    assert steps == [1, 1, 1]
    for events in told:
        texts = [event.text for event in events if isinstance(event, Notice)]
        assert ["worker 2 finds" in texts[0], "worker 1 finds" in texts[1], len(texts)] == [True, True, 2]


def test_c43_what_one_cannot_see_nobody_begins_from(root: Path, tmp_path: Path) -> None:
    behind = tmp_path / "behind"
    shutil.copytree(root, behind)
    newest = max(behind.iterdir(), key=lambda path: path.name)
    shutil.rmtree(newest)
    steps, told = begin([root, behind, root], lambda _rank, _checkpoint: None)
    assert steps == [2, 2, 2]
    assert all("All machines must share that place" in str(events) for events in told)


def test_c43_a_place_that_is_not_shared_begins_nothing_anew(root: Path, tmp_path: Path) -> None:
    """It would train from step 0 and prune what was there."""
    meeting = HashStore()
    for attempt in range(3):
        meeting.set(f"resume/{attempt}/1", '"no complete checkpoint as seen from worker 1"')
    with pytest.raises(CheckpointError, match=r"None of the 3 checkpoints in .* can be used"):
        begin_from(
            open_store(str(root)),
            CheckpointConfig(url=str(root)),
            World(rank=0, size=2, store=meeting),
            use=lambda _: None,
            publish=lambda _: None,
        )
