"""Channels over real sockets: order, room, strangers, the ways to end."""

from __future__ import annotations

import logging
import os
import signal
import socket
import threading
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.distributed import HashStore, Store

from tests.run.pipes import (
    address_of,
    nothing_leaks,  # noqa: F401
    options,
    pipeline,
    receive,
    send,
    wait_until,
)
from varuna.errors import PeerLost, ProtocolError
from varuna.run.channel import StageChannels, open_channels
from varuna.run.connect import ConnectOptions
from varuna.run.wire import Direction
from varuna.testing.forked import barrier, run_forked, values_of

ACTIVATION, GRADIENT = Direction.ACTIVATION, Direction.GRADIENT
MEGABYTE = 1 << 20
AT_ONCE_S = 10.0  # on a busy machine; nothing here waits for a time limit


def raised_by(work: threading.Thread, errors: Sequence[BaseException]) -> BaseException:
    work.join(AT_ONCE_S)
    assert not work.is_alive(), "still blocked"
    assert len(errors) == 1
    return errors[0]


def in_thread(work: object) -> tuple[threading.Thread, list[BaseException]]:
    """Run ``work`` in a thread that keeps what it raises."""
    errors: list[BaseException] = []

    def run() -> None:
        try:
            assert callable(work)
            work()
        except (PeerLost, ProtocolError) as error:
            errors.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, errors


# --- messages -----------------------------------------------------------------------------------


def test_messages_flow_both_ways_in_order() -> None:
    sizes = [1, 3000, 200_000, 5, 70_000, 0, 16_000] * 8
    with pipeline(3, max_unread=len(sizes) + 1) as stages:
        for k, size in enumerate(sizes):
            send(stages[1], k, torch.full((size,), k % 100, dtype=torch.uint8), direction=ACTIVATION)
            send(stages[1], k, torch.full((size,), k % 100, dtype=torch.uint8), None, direction=GRADIENT)
        for k, size in enumerate(sizes):
            forward, backward = receive(stages[2], ACTIVATION), receive(stages[0], GRADIENT)
            assert forward.header.micro_batch_index == backward.header.micro_batch_index == k
            assert len(backward.message.values) == 2
            assert backward.message.values[1] is None
            for value in (forward.message.values[0], backward.message.values[0]):
                assert value is not None
                assert value.shape == (size,)
                assert bool((value == k % 100).all())


def test_only_neighbours_have_channels() -> None:
    with pipeline(3) as stages:
        assert str(stages[1].peer_of(ACTIVATION)).startswith("Worker 0 (stage 0, 127.0.0.1:")
        assert str(stages[1].peer_of(GRADIENT)).startswith("Worker 2 (stage 2, 127.0.0.1:")
        with pytest.raises(KeyError):
            send(stages[0], 0, torch.ones(1), direction=GRADIENT)


def test_sending_never_waits_for_the_receiver() -> None:
    """Both sides send far more than streams and mailboxes hold before either reads: nobody is blocked."""
    num_messages = 60
    with pipeline(2, max_unread=2) as stages:
        for k in range(num_messages):
            send(stages[0], k, torch.full((MEGABYTE,), k, dtype=torch.uint8), direction=ACTIVATION)
            send(stages[1], k, torch.full((MEGABYTE,), k, dtype=torch.uint8), direction=GRADIENT)
        for k in range(num_messages):
            for stage, direction in ((stages[1], ACTIVATION), (stages[0], GRADIENT)):
                value = receive(stage, direction).message.values[0]
                assert value is not None
                assert bool((value == k).all())


def test_a_stage_that_does_not_read_holds_only_max_unread_messages() -> None:
    with pipeline(2, max_unread=3) as stages:
        for k in range(40):
            send(stages[0], k, torch.zeros(MEGABYTE, dtype=torch.uint8))
        receiver = stages[1]
        wait_until(receiver.mailbox, lambda: receiver.mailbox.num_unread(ACTIVATION) == 3)
        waiting = threading.Thread(target=stages[0].wait_unsent, args=(ACTIVATION, 0))
        waiting.start()
        for k in range(40):
            assert receiver.mailbox.num_unread(ACTIVATION) <= 3
            assert receive(receiver).header.micro_batch_index == k
        waiting.join(AT_ONCE_S)
        assert not waiting.is_alive(), "wait_unsent did not notice that all is sent"


def test_tensors_live_until_they_are_sent_and_no_longer() -> None:
    with pipeline(2, max_unread=1) as stages:
        tensors = [torch.full((4 * MEGABYTE,), k, dtype=torch.uint8) for k in range(6)]
        gone = [weakref.ref(tensor) for tensor in tensors]
        for k in range(6):
            send(stages[0], k, tensors[k])
        del tensors
        assert gone[5]() is not None, "a queued tensor was dropped"
        for k in range(6):
            value = receive(stages[1]).message.values[0]
            assert value is not None
            assert bool((value == k).all())
        stages[0].wait_unsent(ACTIVATION, 0)
        stages[0].close()
        assert [ref() for ref in gone] == [None] * 6


@pytest.mark.gpu
def test_cuda_tensors_are_sent_when_their_stream_has_written_them() -> None:
    """The sender does not wait for the device, and what it sends is what the stream holds at that point."""
    send_s = []
    with pipeline(2, pin_memory=True) as stages:
        for k in range(8):
            tensor = torch.zeros(MEGABYTE, device="cuda")
            torch.cuda._sleep(100_000_000)  # some 50 ms
            tensor += k
            started_s = time.monotonic()
            send(stages[0], k, tensor, tensor[::2], None)
            send_s.append(time.monotonic() - started_s)
            tensor.zero_()
            dense, strided, missing = receive(stages[1]).message.values
            assert missing is None
            for value in (dense, strided):
                assert value is not None
                assert value.is_pinned()
                assert bool((value == k).all())
    assert min(send_s) < 0.02, "the first ones may wait for new pinned memory, not all"


# --- connecting ---------------------------------------------------------------------------------


def open_pair(
    first: ConnectOptions, second: ConnectOptions, store: Store | None = None
) -> tuple[StageChannels | BaseException, StageChannels | BaseException]:
    shared = HashStore() if store is None else store

    def open_one(rank: int) -> StageChannels | BaseException:
        try:
            return open_channels(shared, address_of(rank, 2), (first, second)[rank])
        except (PeerLost, ProtocolError) as error:
            return error

    with ThreadPoolExecutor(2) as pool:
        left, right = pool.map(open_one, range(2))
    return left, right


def close_all(*ends: object) -> None:
    for end in ends:
        if isinstance(end, StageChannels):
            end.abort()


def published_address(store: Store) -> tuple[str, int]:
    store.wait(["channels/7/1"])
    host, _, port = store.get("channels/7/1").decode().rpartition("|")
    return host, int(port)


def is_refused(stranger: socket.socket) -> bool:
    """The other side closed; a reset is what closing looks like where something sent was not read."""
    stranger.settimeout(AT_ONCE_S)
    try:
        return stranger.recv(100) == b""
    except ConnectionResetError:
        return True


@pytest.mark.parametrize(
    "greeting",
    [b"", b"GET / HTTP/1.1\r\n\r\n", b"\0" * 64, bytes(range(64))],
    ids=["silent", "http", "zeros", "bytes"],
)
def test_strangers_are_refused_and_hold_nobody_up(greeting: bytes, caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool, caplog.at_level(logging.WARNING, logger="varuna.run"):
        right = pool.submit(open_channels, store, address_of(1, 2), options())
        strangers = [socket.create_connection(published_address(store)) for _ in range(3)]
        for stranger in strangers:
            stranger.sendall(greeting)
        left = open_channels(store, address_of(0, 2), options())
        send(left, 0, torch.ones(3))
        assert receive(right.result()).header.micro_batch_index == 0
        for stranger in strangers:
            with stranger:
                assert is_refused(stranger)
        close_all(left, right.result())
    if len(greeting) == 64:
        assert "not of this job" in caplog.text


def test_more_silent_strangers_than_are_kept() -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        right = pool.submit(open_channels, store, address_of(1, 2), options())
        strangers = [socket.create_connection(published_address(store)) for _ in range(70)]
        left = open_channels(store, address_of(0, 2), options())
        close_all(left, right.result())
        for stranger in strangers:
            stranger.close()


def test_another_token_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    short = options(timeout_s=0.5)
    left, right = open_pair(replace(short, token=b"another job"), short)
    close_all(left, right)
    assert isinstance(left, ProtocolError)
    assert "refused the connection of worker 0" in str(left)
    assert isinstance(right, PeerLost)
    assert "worker 0 (stage 0) to connect" in str(right)
    assert "not of this job" in caplog.text


def test_another_generation_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    """A worker that missed a change of generation knows a port of the new one: it is told nothing."""
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        right = pool.submit(open_channels, store, address_of(1, 2), options())
        host, port = published_address(store)
        store.set("channels/6/1", f"{host}|{port}")
        with pytest.raises(ProtocolError, match="generation 6"):
            open_channels(store, address_of(0, 2), options(generation=6))
        left = open_channels(store, address_of(0, 2), options())
        close_all(left, right.result())
    assert "it is of generation 6, this worker of 7" in caplog.text


def test_a_worker_of_the_wrong_place_is_refused(caplog: pytest.LogCaptureFixture) -> None:
    store = HashStore()
    with ThreadPoolExecutor(1) as pool:
        right = pool.submit(open_channels, store, address_of(1, 2), options())
        published_address(store)
        with pytest.raises(ProtocolError, match="refused"):
            open_channels(store, replace(address_of(0, 2), rank=5), options())
        left = open_channels(store, address_of(0, 2), options())
        close_all(left, right.result())
    assert "worker 5 looks for 1; this is 1, after 0" in caplog.text


@pytest.mark.parametrize("rank", [0, 1])
def test_a_neighbour_that_never_comes_is_named(rank: int) -> None:
    with pytest.raises(PeerLost, match=rf"waited 0 s for worker {1 - rank} \(stage {1 - rank}\)"):
        open_channels(HashStore(), address_of(rank, 2), options(timeout_s=0.05))


@pytest.mark.parametrize("rank", [0, 1])
def test_connecting_can_be_cancelled(rank: int) -> None:
    waiting = options()
    thread, errors = in_thread(lambda: open_channels(HashStore(), address_of(rank, 2), waiting))
    waiting.cancelled.set()
    assert "cancelled" in str(raised_by(thread, errors))


def test_an_address_where_nobody_listens() -> None:
    store = HashStore()
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    store.set("channels/7/1", f"127.0.0.1|{port}")
    with pytest.raises(PeerLost, match=r"Worker 1 \(stage 1, 127.0.0.1:\d+\) cannot be reached"):
        open_channels(store, address_of(0, 2), options())


# --- endings ------------------------------------------------------------------------------------


def test_close_delivers_what_was_sent() -> None:
    with pipeline(2) as stages:
        for k in range(20):
            send(stages[0], k, torch.full((MEGABYTE,), k, dtype=torch.uint8))
        stages[0].close()
        stages[0].close()
        for k in range(20):
            assert receive(stages[1]).header.micro_batch_index == k
        wait_until(stages[1].mailbox, lambda: stages[1].mailbox.has_ended(ACTIVATION))


def test_close_does_not_wait_for_ever_for_a_peer_that_does_not_read() -> None:
    with pipeline(2, max_unread=1) as stages:
        for k in range(30):
            send(stages[0], k, torch.zeros(MEGABYTE, dtype=torch.uint8))
        started_s = time.monotonic()
        stages[0].close(timeout_s=0.1)
        assert time.monotonic() - started_s < AT_ONCE_S


def test_close_with_a_reason_tells_the_neighbours() -> None:
    with pipeline(3) as stages:
        stages[1].close("ValueError: no such luck")
        for stage, direction in ((stages[0], GRADIENT), (stages[2], ACTIVATION)):
            with pytest.raises(PeerLost, match=r"Worker 1 \(stage 1, .*\) stopped: ValueError: no such luck"):
                receive(stage, direction)


def test_abort_frees_a_thread_that_waits_for_an_arrival() -> None:
    with pipeline(2) as stages:
        thread, errors = in_thread(lambda: receive(stages[1]))
        stages[1].abort("generation 8 begins")
        assert "generation 8 begins" in str(raised_by(thread, errors))


def test_abort_frees_full_streams_and_mailboxes() -> None:
    with pipeline(2, max_unread=1) as stages:
        for k in range(30):
            send(stages[0], k, torch.zeros(MEGABYTE, dtype=torch.uint8))
        unsent = threading.Thread(target=stages[0].wait_unsent, args=(ACTIVATION, 0))
        unsent.start()
        started_s = time.monotonic()
        for stage in stages:
            stage.abort()
        unsent.join(AT_ONCE_S)
        assert not unsent.is_alive()
        assert time.monotonic() - started_s < AT_ONCE_S
        with pytest.raises(PeerLost, match="closed"):
            send(stages[0], 30, torch.zeros(1))


def test_abort_from_many_threads() -> None:
    with pipeline(2) as stages, ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda _: stages[0].abort(), range(8)))


def test_a_lost_receiver_is_noticed_by_the_next_send() -> None:
    with pipeline(2) as stages:
        stages[1].abort()
        with pytest.raises(PeerLost, match=r"Worker 1 \(stage 1"):
            receive(stages[0], GRADIENT)

        def send_until_it_fails() -> None:
            for k in range(1000):
                send(stages[0], k, torch.zeros(MEGABYTE, dtype=torch.uint8))

        with pytest.raises(PeerLost, match=r"Worker 1 \(stage 1, .*\) was lost while a message was sent"):
            send_until_it_fails()


def test_damage_on_a_stream_is_a_protocol_error() -> None:
    with pipeline(2) as stages:
        send(stages[0], 0, torch.zeros(3))
        receive(stages[1])
        raw = stages[0]._send[ACTIVATION]._stream
        raw.sendall(b"not a message of any kind, but long enough for one")
        with pytest.raises(ProtocolError, match="magic b'not '"):
            receive(stages[1])


def test_a_killed_worker_is_lost_at_once() -> None:
    """SIGKILL: nothing is said, the kernel closes the streams."""

    def work(rank: int, store: Store) -> object:
        channels = open_channels(store, address_of(rank, 3), options())
        barrier(store, "connected", 3)
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        started_s = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            receive(channels, GRADIENT if rank == 0 else ACTIVATION)
        duration_s = time.monotonic() - started_s
        channels.close()
        return [str(caught.value), duration_s]

    outcomes = run_forked(3, work)
    assert outcomes[1].exit_code == -signal.SIGKILL
    for outcome in (outcomes[0], outcomes[2]):
        (result,) = values_of((outcome,))
        assert isinstance(result, list)
        assert result[0].startswith("Worker 1 (stage 1, 127.0.0.1:")
        assert result[1] < AT_ONCE_S
