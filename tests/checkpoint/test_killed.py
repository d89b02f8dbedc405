"""C41: killed at any moment of a save or of the removal of older ones, the newest complete checkpoint loads."""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from tests.checkpoint.saving import NAMES, sections_at
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.find import find_checkpoint, open_save, saves_in
from varuna.checkpoint.load import read_tensors
from varuna.checkpoint.retention import Retention
from varuna.checkpoint.save import Saver
from varuna.checkpoint.shares import Share
from varuna.checkpoint.store import open_store
from varuna.checkpoint.values import JobState

NUM_KILLS = 50
NUM_SAVERS = 2


class SavingProcess:
    """A process that saves all the time; what it says is durable is read line by line."""

    def __init__(self, root: Path) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.checkpoint.saving", str(root)],
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self._process.stdout is not None
        self._out = self._process.stdout

    def line(self) -> str:
        return self._out.readline().decode().strip()

    def kill(self) -> int:
        """SIGKILL; returns the last step it had called durable, -1 if it had not saved since."""
        self._process.send_signal(signal.SIGKILL)
        rest = self._out.read().decode().splitlines()
        self._out.close()
        assert self._process.wait() == -signal.SIGKILL, "it must have been alive: an error is no kill"
        steps = [int(line.split()[1]) for line in rest if line.startswith("durable ")]
        return steps[-1] if steps else -1


def busy_wait(seconds: float) -> None:
    """A random moment within a save of some milliseconds: shorter than a sleep can be."""
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        pass


def forked_saver(root: Path) -> tuple[int, int]:
    """A child that saves all the time, forked, so that fifty take seconds: its pid, and what it prints."""
    receiver, sender = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.dup2(sender, 1)
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        os.close(receiver)
        from tests.checkpoint import saving

        sys.stdout = open(1, "w", closefd=False)  # noqa: SIM115
        try:
            saving.main(str(root))
        finally:
            os._exit(1)
    os.close(sender)
    return pid, receiver


def test_c41_killed_at_50_random_moments_the_newest_complete_checkpoint_loads(tmp_path):
    seed = random.SystemRandom().randrange(2**32)
    print(f"seed {seed}")
    draw = random.Random(seed)
    store = open_store(str(tmp_path))
    interrupted = 0
    durable = 0
    for _ in range(NUM_KILLS):
        pid, receiver = forked_saver(tmp_path)
        with os.fdopen(receiver) as out:
            assert out.readline() == f"started {durable}\n"
            for _ in range(draw.randrange(3)):
                durable = int(out.readline().split()[1])
            busy_wait(draw.uniform(0, 0.02))
            os.kill(pid, signal.SIGKILL)
            assert os.waitpid(pid, 0)[1] == signal.SIGKILL, "it must have been alive: an error is no kill"
            for line in out.read().splitlines():
                if line.startswith("durable ") and line.count(" ") == 1 and line.split()[1].isdigit():
                    durable = max(durable, int(line.split()[1]))
        found = find_checkpoint(store, publish=lambda event: pytest.fail(f"{event} (seed {seed})"))
        if found is None:
            assert durable == 0
            continue
        assert found.step in (durable, durable + 1), f"seed {seed}"  # it may die before it can say so
        durable = found.step
        for section in sections_at(durable):
            for name, expected in section.tensors.items():
                assert torch.equal(read_tensors(found, [name])[name], expected), f"seed {seed}"
        interrupted += any(open_save(store, order) is None for order in saves_in(store))
    assert durable > 10
    assert interrupted >= NUM_KILLS // 4, f"only {interrupted} kills hit a save (seed {seed})"
    order = Committer(store, publish=lambda event: pytest.fail(str(event))).begin(durable + 1)
    assert [o for o in saves_in(store) if open_save(store, o) is None] == [order], "leftovers are gone"
    assert len(saves_in(store)) <= 4


def test_c41_a_real_process_goes_on_from_what_the_killed_one_left(tmp_path):
    durable = 0
    for _ in range(NUM_SAVERS):
        process = SavingProcess(tmp_path)
        started = int(process.line().split()[1])
        assert started in (durable, durable + 1)
        durable = int(process.line().split()[1])
        assert durable == started + 1
        durable = max(durable, process.kill())
    found = find_checkpoint(open_store(str(tmp_path)), publish=lambda event: pytest.fail(str(event)))
    assert found is not None
    assert found.step in (durable, durable + 1)
    assert set(read_tensors(found, NAMES)) == set(NAMES)


SYSTEM_CALLS = ("open", "write", "fsync", "rename", "unlink", "rmdir", "makedirs", "close")


def die_at(root: Path, at: int) -> bool:
    """A child that saves step 3 and dies at its ``at``-th call that changes files; False if it had fewer."""
    pid = os.fork()
    if pid == 0:
        try:
            _save_and_die(root, at)
        finally:
            os._exit(1)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), "an error is no kill"
    return status == signal.SIGKILL


def _save_and_die(root: Path, at: int) -> None:
    store = open_store(str(root))
    committer = Committer(store, retention=Retention(newest=1), publish=lambda event: os._exit(2))
    saver = Saver(store, "w0")
    count = 0

    def dying(real):
        def call(*arguments, **options):
            nonlocal count
            count += 1
            if count == at:
                if real is os_write:
                    real(arguments[0], arguments[1][: len(arguments[1]) // 2])
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*arguments, **options)

        return call

    os_write = os.write
    for name in SYSTEM_CALLS:
        setattr(os, name, dying(getattr(os, name)))
    order = committer.begin(3)
    written = saver.save(order, sections_at(3), Share(write=tuple(NAMES))).result()
    job = JobState(step=3, num_samples=3, seed=0, batch_size=1, dataset_length=1)
    committer.commit(order, job, [written], required=NAMES, num_sections=len(NAMES))
    os._exit(0)


def test_c41_killed_at_every_call_that_changes_files(tmp_path):
    """Every moment of a save and of the removal of the one before, half writes included."""
    store = open_store(str(tmp_path))
    committer = Committer(store, retention=Retention(newest=1), publish=lambda event: pytest.fail(str(event)))
    job = JobState(step=2, num_samples=2, seed=0, batch_size=1, dataset_length=1)
    found_steps = []
    at = 1
    while True:
        order = committer.begin(2)
        saver = Saver(store, "w0")
        written = saver.save(order, sections_at(2), Share(write=tuple(NAMES))).result()
        saver.close()
        committer.commit(order, job, [written], required=NAMES, num_sections=len(NAMES))
        assert [o for o in saves_in(store) if o.sequence <= order.sequence] == [order], "leftovers went"
        if not die_at(tmp_path, at):
            break
        found = find_checkpoint(store, publish=lambda event: pytest.fail(str(event)))
        assert found is not None
        for name, tensor in read_tensors(found, NAMES).items():
            assert tensor.eq(found.step + NAMES.index(name) / 10).all()
        found_steps.append(found.step)
        at += 1
    assert len(found_steps) > 30
    assert found_steps == sorted(found_steps), "the older one until the manifest is there, then the newer"
    assert set(found_steps) == {2, 3}
