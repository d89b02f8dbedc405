"""Members of a save in one process: who writes what dead ones owed, who commits, what is given up."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore

from tests.launch.jobs import wait_until
from varuna.checkpoint.collect import SectionState
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.find import find_checkpoint
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.save import Saver
from varuna.checkpoint.store_file import FileStore
from varuna.checkpoint.values import JOB_SECTION, JobState
from varuna.config_checkpoint import CheckpointConfig
from varuna.events import CheckpointFailed, CheckpointSaved, Event, Notice
from varuna.persist.contents import Contents
from varuna.persist.saves import Saves
from varuna.persist.schedule import SaveSchedule
from varuna.run.commit import SaveMark

MARK = SaveMark(sequence=1, number=0xABCDEF)
NAMES = tuple(f"parameters/{index}" for index in range(6))


class Numbered:
    """What ``Saves`` uses of a standing."""

    last_sequence = 0


class Job:
    """Members of one job, as far as saves go; they meet in a store that each generation has anew."""

    def __init__(self, root: Path, size: int, *, holders: tuple[int, ...]) -> None:
        self.store = FileStore(root)
        self.size, self.holders = size, holders
        self.complete: list[int] = []
        self.meeting = HashStore()
        self.is_aborted = False
        self.members = [self._member(rank) for rank in range(size)]
        self.begun: set[int] = set()

    def _member(self, rank: int) -> Saves:
        return Saves(
            self.store,
            Saver(self.store, f"w{rank}"),
            SaveSchedule(CheckpointConfig(url="x", every_steps=1), 0.0),
            self.meeting,
            make_committer=lambda publish: Committer(self.store, publish=publish),
            standing=Numbered(),  # type: ignore[arg-type]
            at=lambda _: None,
            complete=lambda order: self.complete.append(order.step),
            is_aborted=lambda: self.is_aborted,
            obstacle=lambda: "no store" if self.is_aborted else "",
        )

    def contents(self, rank: int) -> Contents:
        tensors = {name: torch.full((4,), float(index)) for index, name in enumerate(NAMES)}
        section = SectionState(section_index=0, tensors=tensors)
        extra = SectionState(section_index=JOB_SECTION, tensors={"job/x": torch.ones(2)})
        return Contents(
            sections=(section, extra) if rank in self.holders else (extra,),
            holders={0: self.holders, JOB_SECTION: tuple(range(self.size))},
            job=JobState(step=1, num_samples=1, seed=0, batch_size=1, dataset_length=1),
            required=frozenset(NAMES),
            num_sections=1,
        )

    def begin(self, *ranks: int) -> None:
        for rank in ranks:
            self.members[rank].begin(MARK, 1, rank, self.contents(rank))
            self.begun.add(rank)

    def meet(self, *ranks: int, generation: int = 1) -> None:
        """The next generation: these are left."""
        self.meeting = HashStore()
        told = [self.members[rank].tell() for rank in ranks]
        for rank in ranks:
            self.members[rank].hear(told, generation, self.meeting)

    def news(self, rank: int) -> list[Event]:
        return list(self.members[rank].news())

    def is_whole(self) -> bool:
        found = find_checkpoint(self.store, publish=lambda event: pytest.fail(str(event)))
        if found is None:
            return False
        read = read_tensors(found, [*NAMES, "job/x"])
        return all(read[name].eq(index).all() for index, name in enumerate(NAMES))

    def close(self) -> None:
        self.is_aborted = True
        for member in self.members:
            member.close()


@pytest.fixture
def job(tmp_path: Path) -> Iterator[Job]:
    made = Job(tmp_path, 3, holders=(0, 1, 2))
    yield made
    made.close()
    assert not [one.name for one in threading.enumerate() if one.name.startswith("varuna-")]


def test_all_answer(job: Job) -> None:
    job.begin(0, 1, 2)
    wait_until(lambda: job.complete == [1], 120)
    assert job.is_whole()
    (saved,) = job.news(0)
    assert isinstance(saved, CheckpointSaved)
    assert saved.size_bytes > 0


def test_one_dies_and_the_others_write_what_it_owed(job: Job) -> None:
    job.begin(0, 1)
    job.meet(0, 1)
    wait_until(lambda: job.complete == [1], 120)
    assert job.is_whole()


def test_the_committer_dies_and_the_next_takes_over(job: Job) -> None:
    job.begin(1, 2)
    job.meet(1, 2)
    wait_until(lambda: job.complete == [1], 120)
    assert job.is_whole()
    assert isinstance(job.news(1)[0], CheckpointSaved)


def test_one_after_the_other_dies(job: Job) -> None:
    """What the second had kept for the first is gone with it: whole or given up, never something in between."""
    job.begin(0, 1)
    job.meet(0, 1)
    job.meet(0, generation=2)
    wait_until(lambda: bool(job.complete) or bool(job.news(0)), 120)
    assert job.is_whole() == (job.complete == [1])


def test_the_only_holder_dies_and_the_save_is_given_up(tmp_path: Path) -> None:
    job = Job(tmp_path, 2, holders=(1,))
    job.begin(0)
    job.meet(0)
    told: list[Event] = []
    wait_until(lambda: bool(told.extend(job.news(0)) or told), 120)
    (failed,) = told
    assert isinstance(failed, CheckpointFailed)
    assert "a worker was lost before it had written parameters/0" in failed.reason
    assert list(tmp_path.iterdir()) == []
    job.close()


def test_the_committer_leaves_and_another_takes_over(job: Job) -> None:
    job.begin(0, 1, 2)
    leaver = job.members[0]
    leaver.leave()
    job.meet(1, 2)
    wait_until(lambda: job.complete == [1], 120)
    assert job.is_whole()


def test_a_job_that_goes_back_gives_up_what_is_under_way(job: Job) -> None:
    job.begin(0, 1)
    for member in job.members[:2]:
        member.go_back()
    job.members[0].settle()
    (failed,) = job.news(0)
    assert isinstance(failed, CheckpointFailed)
    assert failed.reason == "the job went back to an older step"
    assert job.complete == []


def test_a_failed_job_waits_no_longer_than_a_moment(job: Job) -> None:
    job.begin(0, 1)
    job.members[0].fail()
    job.members[0].settle()
    (failed,) = job.news(0)
    assert isinstance(failed, CheckpointFailed)
    assert "the job ended before all its workers had written" in failed.reason


def test_no_second_save_begins_before_the_first_is_over(job: Job) -> None:
    job.begin(0, 1)
    member = job.members[0]
    assert member.wish(2, is_last=False) is None
    (notice,) = job.news(0)
    assert isinstance(notice, Notice)
    assert "No checkpoint of step 2" in notice.text
    job.begin(2)
    wait_until(lambda: job.complete == [1], 120)
    member.settle()
    assert member.wish(3, is_last=False) is not None


def test_the_end_of_a_call_waits_for_the_save_before_it(job: Job) -> None:
    job.begin(0, 1)
    found: list[SaveMark | None] = []
    thread = threading.Thread(target=lambda: found.append(job.members[0].wish(2, is_last=True)))
    thread.start()
    assert thread.is_alive()
    job.begin(2)
    thread.join(10)
    assert found[0] is not None
    assert found[0].sequence == 2


def test_why_no_save_begins_is_told_once_and_at_the_end(job: Job) -> None:
    member = job.members[0]
    job.is_aborted = True
    wishes = [member.wish(step, is_last=step == 3) for step in (1, 2, 3)]
    assert wishes == [None, None, None]
    told = [(event.step, event.reason) for event in job.news(0) if isinstance(event, CheckpointFailed)]
    assert told == [(1, "no store"), (3, "no store")]
    job.is_aborted = False
    assert member.wish(4, is_last=False) is not None
