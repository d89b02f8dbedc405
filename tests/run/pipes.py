"""Real channels between stages inside one process, and a fixture that finds what they leak."""

from __future__ import annotations

import gc
import os
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager

import pytest
import torch
from torch.distributed import HashStore, Store

from varuna.run.channel import StageChannels, open_channels
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.mailbox import Arrival, Mailbox
from varuna.run.wire import Direction, Message, MessageHeader

TOKEN = b"secret of the job"


def open_descriptors() -> set[str]:
    """Sockets and pipes of this process."""
    names = set()
    for name in os.listdir("/proc/self/fd"):
        try:
            target = os.readlink(f"/proc/self/fd/{name}")
        except FileNotFoundError:
            continue
        if target.startswith(("socket:", "pipe:")):
            names.add(target)
    return names


@pytest.fixture(autouse=True)
def nothing_leaks() -> Iterator[None]:
    """No test leaves a thread, socket or pipe."""
    descriptors, threads = open_descriptors(), set(threading.enumerate())
    yield
    if open_descriptors() - descriptors:
        gc.collect()  # sockets of the test itself, in reference cycles
    left = [thread.name for thread in threading.enumerate() if thread not in threads]
    assert left == [], "threads left"
    assert open_descriptors() - descriptors == set(), "sockets left"


def address_of(rank: int, num_stages: int) -> StageAddress:
    return StageAddress(
        rank=rank,
        stage_index=rank,
        previous_rank=rank - 1 if rank else None,
        next_rank=rank + 1 if rank + 1 < num_stages else None,
    )


def options(*, generation: int = 7, token: bytes = TOKEN, timeout_s: float = 20.0) -> ConnectOptions:
    return ConnectOptions(generation=generation, token=token, host="127.0.0.1", timeout_s=timeout_s)


@contextmanager
def pipeline(
    num_stages: int, *, store: Store | None = None, max_unread: int = 32, pin_memory: bool = False
) -> Iterator[Sequence[StageChannels]]:
    """Channels of all stages of a pipeline; closed (aborted) at the end."""
    shared = HashStore() if store is None else store

    def open_one(rank: int) -> StageChannels:
        return open_channels(
            shared, address_of(rank, num_stages), options(), max_unread=max_unread, pin_memory=pin_memory
        )

    with ThreadPoolExecutor(num_stages) as pool:
        channels = list(pool.map(open_one, range(num_stages)))
    try:
        yield channels
    finally:
        for stage in channels:
            stage.abort()


def header(k: int, direction: Direction = Direction.ACTIVATION) -> MessageHeader:
    return MessageHeader(
        generation=7, step_index=3, micro_batch_index=k, operation="train", direction=direction
    )


def send(
    channels: StageChannels, k: int, *values: torch.Tensor | None, direction: Direction = Direction.ACTIVATION
) -> None:
    message = Message(values=values)
    channels.send(header(k, direction), message)


def wait_until(mailbox: Mailbox, holds: Callable[[], bool]) -> None:
    """Sleep until something about the mailbox holds."""
    while True:
        version = mailbox.version
        if holds():
            return
        mailbox.wait_past(version)


def receive(channels: StageChannels, direction: Direction = Direction.ACTIVATION) -> Arrival:
    """The next arrival, waited for; raises the mailbox's failure."""
    mailbox = channels.mailbox
    while True:
        version = mailbox.version
        if mailbox.num_unread(direction):
            return mailbox.take(direction)
        if mailbox.failure is not None:
            raise mailbox.failure
        mailbox.wait_past(version)
