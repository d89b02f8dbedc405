"""When the launcher takes a manager for frozen."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from varuna.config import MorphConfig
from varuna.launch.manager import ManagerProcess
from varuna.launch.protocol import Channel


@pytest.fixture
def channel() -> Iterator[Channel]:
    ours, its = socket.socketpair()
    yield Channel(ours)
    ours.close()
    its.close()


@pytest.fixture
def manager(tmp_path: Path) -> Iterator[ManagerProcess]:
    made = ManagerProcess("token", tmp_path, MorphConfig(manager_limit_s=8.0))
    yield made
    made.close()


def test_a_silent_manager_is_to_be_killed_once_for_each_life(manager: ManagerProcess, channel: Channel) -> None:
    for start_s in (100.0, 200.0):
        num_heard = int(start_s)
        manager.start(channel, start_s)
        assert [manager.silent_s(num_heard, start_s + second) for second in range(8)] == [0.0] * 8
        assert manager.silent_s(num_heard, start_s + 8.0) == 8.0
        assert manager.silent_s(num_heard, start_s + 9.0) == 0.0, "its end is under way"


def test_one_that_starts_has_more_time(manager: ManagerProcess, channel: Channel) -> None:
    manager.start(channel, 100.0)
    assert [manager.silent_s(0, 100.0 + second) for second in range(60)] == [0.0] * 60
    assert manager.silent_s(0, 160.0) == 60.0


def test_one_that_is_heard_is_alive(manager: ManagerProcess, channel: Channel) -> None:
    manager.start(channel, 0.0)
    assert [manager.silent_s(second // 4, float(second)) for second in range(60)] == [0.0] * 60


def test_a_launcher_that_was_frozen_itself_does_not_count_that_time(
    manager: ManagerProcess, channel: Channel
) -> None:
    manager.start(channel, 0.0)
    assert manager.silent_s(1, 1.0) == 0.0
    assert manager.silent_s(1, 1000.0) == 0.0


def test_one_that_is_not_started_again_is_not_missed(manager: ManagerProcess, channel: Channel) -> None:
    manager.start(channel, 0.0)
    manager.close()
    assert [manager.silent_s(0, float(second)) for second in range(20)] == [0.0] * 20
