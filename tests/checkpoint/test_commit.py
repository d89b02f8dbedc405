"""C42, C50, F60: saves that fail, workers that die in one, and what goes when."""

from __future__ import annotations

import errno
import os
import resource
import signal
import subprocess
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.checkpoint.state import (
    NUM_SECTIONS,
    begin_save,
    layout,
    required_names,
    save,
    sections_of,
    train,
    trained,
)
from tests.checkpoint.stores import WatchedStore
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.errors import CheckpointError
from varuna.checkpoint.find import find_checkpoint, open_save, saves_in
from varuna.checkpoint.retention import (
    Evidence,
    Retention,
    is_leftover,
    newest_first,
    parse_directory,
    to_prune,
)
from varuna.checkpoint.save import Answer, Saver
from varuna.checkpoint.shares import planned_shares, reassign
from varuna.checkpoint.store import open_store
from varuna.checkpoint.store_file import FileStore
from varuna.checkpoint.values import JOB_SECTION, PartFailed, SaveOrder, Written
from varuna.checkpoint.verify import problems_of
from varuna.errors import ConfigError
from varuna.events import Notice


def never(event: object) -> None:
    pytest.fail(str(event))


def steps_in(store: FileStore) -> list[int]:
    return [order.step for order in saves_in(store) if open_save(store, order) is not None]


# --- retention ------------------------------------------------------------------------------


def test_c42_older_ones_go_only_after_the_newer_is_durable_and_lose_their_manifest_first(tmp_path):
    store = WatchedStore(tmp_path)
    committer = Committer(store, retention=Retention(newest=2), publish=never)
    state = trained(1)
    directories = []
    for _ in range(4):
        directories.append(save(store, state, committer=committer).order.directory)
        train(state, 1)
    assert steps_in(store) == [4, 3]
    for older, newer in zip(directories[:2], directories[2:], strict=True):
        marker = store.done.index(("marker", f"{newer}/manifest.json"))
        removed = store.done.index(("remove file", f"{older}/manifest.json"))
        assert marker < removed < store.done.index(("remove", older))


def test_c42_a_save_that_cannot_be_completed_removes_nothing_older(tmp_path):
    store = WatchedStore(tmp_path, {("marker", "manifest.json"): OSError(errno.EIO, "bad disk")})
    good = FileStore(tmp_path)
    state = trained(1)
    save(good, state)
    train(state, 1)
    committer = Committer(store, retention=Retention(newest=1), publish=never)
    with pytest.raises(CheckpointError, match=r"step 2 .* could not be completed: .*bad disk\.$"):
        save(store, state, committer=committer)
    assert steps_in(good) == [1]
    assert len(good.directories()) == 1


def test_what_cannot_be_removed_is_told_and_the_new_checkpoint_counts(tmp_path):
    state = trained(1)
    first = save(FileStore(tmp_path), state).order.directory
    train(state, 1)
    store = WatchedStore(tmp_path, {("remove", first): PermissionError(errno.EACCES, "not yours")})
    events: list[object] = []
    committer = Committer(store, retention=Retention(newest=1), publish=events.append)
    save(store, state, committer=committer)
    assert steps_in(store) == [2]
    assert [type(event) for event in events] == [Notice]
    assert "could not be removed: [Errno 13] not yours" in str(events[0])


def test_every_kth_stays(tmp_path):
    store = open_store(str(tmp_path))
    committer = Committer(store, retention=Retention(newest=1, every_steps=3), publish=never)
    state = trained(1)
    for _ in range(7):
        save(store, state, committer=committer)
        train(state, 1)
    assert steps_in(store) == [7, 6, 3]
    with pytest.raises(ConfigError, match="Keep at least 1"):
        Retention(newest=0)


orders = st.builds(
    lambda sequence, step: SaveOrder(save_id=f"{sequence:08x}", sequence=sequence, step=step),
    st.integers(1, 30),
    st.integers(0, 60),
)


@given(st.lists(orders, unique_by=lambda order: order.sequence), st.integers(1, 5), st.integers(1, 9))
def test_retention_keeps_the_newest_and_the_multiples(complete, newest, every):
    committed = SaveOrder(save_id="now", sequence=20, step=100)
    everything = newest_first([*(order for order in complete if order.sequence != 20), committed])
    gone = to_prune(everything, committed, Retention(newest=newest, every_steps=every))
    assert committed not in gone
    not_newer = [order for order in everything if order.sequence <= 20]
    expected = [order for order in not_newer[newest:] if order.step % every]
    assert sorted(gone, key=lambda order: order.sequence) == expected[::-1]


def test_newest_is_by_sequence_so_that_going_back_to_an_older_step_stays_so():
    old = SaveOrder(save_id="a", sequence=4, step=1200)
    after_going_back = SaveOrder(save_id="b", sequence=5, step=1100)
    assert newest_first([old, after_going_back])[0] is after_going_back


@given(orders)
def test_directories_name_their_save(order):
    assert parse_directory(order.directory) == order


@pytest.mark.parametrize("name", ["step-12", "checkpoint", "step-000000001-save-00001-", ".tmp", ""])
def test_other_directories_are_not_touched(name):
    assert parse_directory(name) is None


@pytest.mark.parametrize(
    ("is_held", "is_ours", "idle_s", "expected"),
    [
        (True, True, 1e9, False),
        (False, False, 0.0, True),
        (None, True, 0.0, True),
        (None, False, None, False),
        (None, False, 99.0, False),
        (None, False, 100.0, True),
    ],
)
def test_what_counts_as_a_leftover(is_held, is_ours, idle_s, expected):
    assert is_leftover(Evidence(is_held=is_held, is_ours=is_ours, idle_s=idle_s), grace_s=100.0) is expected


def test_leftovers_of_a_crash_go_at_the_next_save_but_never_those_of_a_live_one(tmp_path):
    store = FileStore(tmp_path)
    live = Committer(store, publish=never).begin(5)
    store.write(f"{live.directory}/section-00000-w0.safetensors", [b"half"])
    crashed = SaveOrder(save_id="deadbeef", sequence=2, step=3)
    store.make_directory(crashed.directory)
    store.write(f"{crashed.directory}/section-00000-w0.safetensors", [b"half"])
    (tmp_path / "mine").mkdir()
    begun = Committer(store, publish=never).begin(6)
    assert begun.sequence == 3
    assert set(store.directories()) == {live.directory, begun.directory, "mine"}
    assert store.is_held(live.directory)


def test_a_committer_that_died_is_followed_by_another(tmp_path):
    store = open_store(str(tmp_path))
    first, second = (Committer(store, publish=never) for _ in range(2))
    state = trained(1)
    savers = {0: Saver(store, "w0")}
    order, job, futures = begin_save(first, savers, state, layout(1, 1))
    answers = [future.result(timeout=30) for future in futures.values()]
    with pytest.raises(CheckpointError, match="A save cannot begin in "):
        second.open(order)  # it is alive
    first._release(order)  # what the kernel does when it is not
    second.open(order)
    second.commit(order, job, answers, required=required_names(state), num_sections=NUM_SECTIONS)
    savers[0].close()
    assert steps_in(store) == [1]


# --- C50 ------------------------------------------------------------------------------------


def _can_mount() -> bool:
    """Root in a container may still not mount."""
    if os.geteuid() != 0:
        return False
    return subprocess.run(["unshare", "-m", "true"], capture_output=True, check=False).returncode == 0


@pytest.fixture(params=["limit", "tmpfs"] if _can_mount() else ["limit"])
def small_disk(request, tmp_path) -> Iterator[Path]:
    """A place with room for a few hundred KB: a small tmpfs, or a limit on the size of files."""
    if request.param == "tmpfs":
        place = tmp_path / "small"
        place.mkdir()
        subprocess.run(["mount", "-t", "tmpfs", "-o", "size=300k", "tmpfs", str(place)], check=True)
        try:
            yield place
        finally:
            subprocess.run(["umount", str(place)], check=True)
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (250_000, before[1]))
    try:
        yield tmp_path
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def test_c50_a_full_disk_reaches_all_as_a_value_and_the_old_checkpoint_stays(small_disk):
    store = FileStore(small_disk)
    committer = Committer(store, publish=never)
    small, large = trained(1), trained(2, width=170)
    savers = {worker: Saver(store, f"w{worker}") for worker in range(2)}
    holders = layout(2, 1)
    try:
        order, job, futures = begin_save(committer, savers, small, holders)
        answers = [future.result(timeout=30) for future in futures.values()]
        committer.commit(order, job, answers, required=required_names(small), num_sections=NUM_SECTIONS)
        order, _, futures = begin_save(committer, savers, large, holders)
        answers = [future.result(timeout=30) for future in futures.values()]
        failed = [answer for answer in answers if isinstance(answer, PartFailed)]
        assert failed, "the disk must have been full"
        for answer in failed:
            assert any(text in answer.reason for text in ("No space left on device", "File too large"))
            assert order.directory in answer.reason
            assert not [e for e in store.files(order.directory) if f"-{answer.worker}." in e.name], "half files"
        committer.abandon(order)
        assert steps_in(store) == [1]
        assert len(store.directories()) == 1
        train(small, 1)
        order, job, futures = begin_save(committer, savers, small, holders)  # training goes on, and saves again
        answers = [future.result(timeout=30) for future in futures.values()]
        committer.commit(order, job, answers, required=required_names(small), num_sections=NUM_SECTIONS)
        assert steps_in(store) == [2, 1]
    finally:
        for saver in savers.values():
            saver.close()


def test_c50_a_write_that_breaks_leaves_no_file(tmp_path):
    def chunks() -> Iterator[bytes]:
        yield b"half"
        raise OSError(errno.ENOSPC, "No space left on device")

    store = FileStore(tmp_path)
    with pytest.raises(OSError, match=rf"No space left on device: '{tmp_path}/part'"):
        store.write("part", chunks())
    assert list(tmp_path.iterdir()) == []
    store.write("part", [b"whole"])
    with pytest.raises(FileExistsError):
        store.write("part", [b"again"])
    assert (tmp_path / "part").read_bytes() == b"whole"


def test_a_tensor_that_nobody_wrote_is_found_before_the_manifest(tmp_path):
    store = open_store(str(tmp_path))
    committer = Committer(store, publish=never)
    state = trained(1)
    savers = {worker: Saver(store, f"w{worker}") for worker in range(2)}
    order, job, futures = begin_save(committer, savers, state, layout(2, 1))
    answers = [future.result(timeout=30) for future in futures.values()]
    for saver in savers.values():
        saver.close()
    with pytest.raises(CheckpointError, match=r"lacks \d+ tensors \(.*parameters/second\.weight"):
        committer.commit(order, job, answers[1:], required=required_names(state), num_sections=NUM_SECTIONS)
    assert store.directories() == ()


def test_parts_on_the_disk_of_another_machine_are_found_before_the_manifest(tmp_path):
    here, there = FileStore(tmp_path / "here"), FileStore(tmp_path / "there")
    committer = Committer(here, publish=never)
    state = trained(1)
    order = committer.begin(1)
    there.make_directory(order.directory)
    saver = Saver(there, "w0")
    sections = sections_of(state, range(NUM_SECTIONS))
    sizes = {section.section_index: section.sizes for section in sections}
    share = planned_shares(0, sizes, layout(1, 1))[0]
    answer = saver.save(order, sections, share).result(timeout=30)
    saver.close()
    from tests.checkpoint.state import job_parts

    with pytest.raises(CheckpointError, match="All machines must share that place"):
        committer.commit(order, job_parts(state)[0], [answer], required=(), num_sections=NUM_SECTIONS)


def test_an_answer_of_another_save_is_refused(tmp_path):
    committer = Committer(open_store(str(tmp_path)), publish=never)
    order = committer.begin(1)
    stale = Written(save_id="old", worker="w3", parts=(), pause_s=0.0, write_s=0.0)
    from tests.checkpoint.state import job_parts

    with pytest.raises(CheckpointError, match="Worker w3 answered for save old"):
        committer.commit(order, job_parts(trained(1))[0], [stale], required=(), num_sections=1)


# --- F60 ------------------------------------------------------------------------------------


class HalfStore(FileStore):
    """Writes half of the first file, says so and waits for its end."""

    def __init__(self, root: Path, ready: int) -> None:
        super().__init__(root)
        self._ready = ready

    def write(self, path, chunks):
        data = b"".join(bytes(chunk) for chunk in chunks)
        with open(self.path_of(path), "wb") as file:
            file.write(data[: len(data) // 2])
            file.flush()
            os.write(self._ready, b"half")
            signal.pause()


def test_f60_a_worker_dies_in_the_middle_of_a_save_and_it_commits_all_the_same(tmp_path):
    """Two pipelines of two stages; worker 3 is a process of its own and is killed with half a file written."""
    store = open_store(str(tmp_path))
    committer = Committer(store, publish=never)
    state = trained(2)
    holders = layout(2, 2)
    survivors = {worker: Saver(store, f"w{worker}") for worker in (0, 1, 2)}
    planned = {}
    try:
        order, job, futures = begin_save(committer, survivors, state, holders)
        for worker in (*survivors, 3):
            held = [index for index in range(NUM_SECTIONS) if worker in holders[index]]
            sizes = {section.section_index: section.sizes for section in sections_of(state, held)}
            planned[worker] = planned_shares(worker, sizes, holders)
        _die_in_the_middle(tmp_path, order, sections_of(state, [2, 3]), planned[3][3])
        answers = [future.result(timeout=30) for future in futures.values()]
        tasks = {w: reassign(planned[w], alive=survivors).write.get(w, ()) for w in survivors}
        assert [worker for worker, names in tasks.items() if names] == [1], "who holds the same sections"
        assert not reassign(planned[1], alive=survivors).lost
        answers.append(survivors[1].write_kept(order, tasks[1]).result(timeout=30))
        committer.commit(order, job, answers, required=required_names(state), num_sections=NUM_SECTIONS)
        found = find_checkpoint(store, publish=never)
        assert found is not None
        assert list(problems_of(found)) == []
        named = {part.file for part in found.manifest.parts}
        assert {entry.name for entry in store.files(order.directory)} == {*named, "manifest.json"}
        late = (
            survivors[1].write_kept(SaveOrder(save_id="other", sequence=9, step=9), tasks[1]).result(timeout=30)
        )
        assert isinstance(late, PartFailed)
    finally:
        for saver in survivors.values():
            saver.close()


def _die_in_the_middle(root: Path, order, sections, share) -> None:
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        Saver(HalfStore(root, sender), "w3").save(order, sections, share)
        signal.pause()
        os._exit(0)
    assert os.read(receiver, 4) == b"half"
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    os.close(receiver)
    os.close(sender)
    half = [path for path in (root / order.directory).iterdir() if "-w3." in path.name]
    assert len(half) == 1


def test_a_save_in_which_the_only_holder_died_is_lost():
    sizes = {0: {"a": 4, "b": 4}, JOB_SECTION: {"c": 4}}
    planned = planned_shares(0, sizes, {0: (0,), JOB_SECTION: (0, 1)}, num_copies=2)
    outcome = reassign(planned, alive=[1])
    assert set(outcome.lost) | {name for names in outcome.write.values() for name in names} == {
        *"ab",
        *planned[0].write,
    }
    assert set(outcome.lost) == {"a", "b"}


def test_a_second_save_waits_for_the_first(tmp_path):
    """Snapshot memory is used again: what the first writes must not change under it."""
    store = open_store(str(tmp_path))
    state = trained(1)
    saver = Saver(store, "w0")
    committer = Committer(store, publish=never)
    futures: list[Future[Answer]] = []
    for _ in range(5):
        _, _, started = begin_save(committer, {0: saver}, state, layout(1, 1))
        futures += started.values()
        assert all(future.done() for future in futures[:-1])
        train(state, 1)
    saver.close()
    assert all(isinstance(future.result(), Written) for future in futures)
