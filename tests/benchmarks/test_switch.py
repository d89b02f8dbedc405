"""The jittering switch: order and delay as pure decisions, and real TCP through it."""

from __future__ import annotations

import os
import random
import socket
import time

import psutil
import pytest

from benchmarks import switch, workers


def packet(source: int, receiver: int, content: int) -> bytes:
    header = bytearray(20)
    header[0] = 0x45
    header[12:20] = bytes((10, 77, 0, source + 1, 10, 77, 0, receiver + 1))
    return bytes(header) + bytes((content,))


def test_packets_of_a_pair_keep_their_order_and_others_do_not_wait() -> None:
    delays_s = iter((0.009, 0.001, 0.002))
    queue = switch.DelayQueue(lambda: next(delays_s))
    queue.put(packet(0, 1, 1), 0.0)
    queue.put(packet(0, 1, 2), 0.001)  # drawn for 0.002, but the first leaves at 0.009
    queue.put(packet(2, 1, 3), 0.001)
    assert queue.next_release_s() == pytest.approx(0.003)
    assert [(rank, data[-1]) for rank, data in queue.due(0.008)] == [(1, 3)]
    assert [(rank, data[-1]) for rank, data in queue.due(0.009)] == [(1, 1), (1, 2)]
    assert queue.next_release_s() is None


def test_delays_are_those_drawn() -> None:
    generator = random.Random(0)
    queue = switch.DelayQueue(lambda: generator.uniform(0.0, 0.01))
    for source in range(100):
        queue.put(packet(source, 1, 0), 1.0)
    assert len(list(queue.due(1.005))) in range(30, 70)
    assert len(list(queue.due(1.01))) in range(30, 70)


def test_packets_follow_each_other_on_a_wire_and_wires_are_apart() -> None:
    queue = switch.DelayQueue(lambda: 0.005, bytes_per_s=2100.0)  # 10 ms for a packet of 21 bytes
    for source, receiver in ((0, 1), (0, 1), (1, 0), (0, 2)):
        queue.put(packet(source, receiver, source), 1.0)
    assert [rank for rank, _ in queue.due(1.0149)] == []
    assert sorted(rank for rank, _ in queue.due(1.0151)) == [0, 1, 2]
    assert queue.next_release_s() == pytest.approx(1.025)


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="network namespaces need root")
def test_a_round_trip_takes_two_delays() -> None:
    line = workers.StartLine(2)
    num_bytes, num_trips = 4096, 10

    def work(rank: int) -> list[float]:
        if rank == 0:
            with socket.create_server((switch.address_of(0), 5000)) as server:
                line.start(rank, 1)
                peer, _ = server.accept()
            with peer:
                for _ in range(num_trips):
                    peer.sendall(peer.recv(num_bytes, socket.MSG_WAITALL))
            return []
        line.start(rank, 1)
        seconds = []
        with socket.create_connection((switch.address_of(0), 5000)) as peer:
            for _ in range(num_trips):
                start = time.monotonic()
                peer.sendall(bytes(num_bytes))
                assert len(peer.recv(num_bytes, socket.MSG_WAITALL)) == num_bytes
                seconds.append(time.monotonic() - start)
        return seconds

    _, seconds = switch.run_jittered(2, work, low_s=0.01, high_s=0.01, timeout_s=30.0)
    assert min(seconds) >= 0.02
    assert sorted(seconds)[num_trips // 2] < 0.06


def test_a_failing_worker_ends_the_run_and_leaves_no_process() -> None:
    def work(rank: int) -> int:
        if rank == 1:
            raise ValueError("as planned")
        time.sleep(60.0)
        return rank

    before = set(psutil.Process().children())
    start = time.monotonic()
    with pytest.raises(RuntimeError, match="Worker 1 ended without a result"):
        workers.run_workers(2, work)
    assert time.monotonic() - start < 30.0
    assert set(psutil.Process().children()) <= before
