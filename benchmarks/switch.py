"""A user-space network switch with delay, jitter and a rate, over TUN devices; needs root and iproute2.

Each worker process lives in a network namespace of its own with one TUN device; the switch process reads IP
packets from all of them and writes each to the device of its destination after a delay drawn anew per packet.
The order from one sender to one receiver is kept, acknowledgements included. The MTU is large, so that a small
message is one packet. Namespaces and devices have no names outside their processes: they vanish with them,
however the run ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import heapq
import os
import random
import select
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from typing import Any

from benchmarks import workers

MTU = 60000
_TUNSETIFF = 0x400454CA
_IFF_TUN, _IFF_NO_PI = 0x0001, 0x1000
_CLONE_NEWNET = 0x40000000
DEVICE = "tun0"


def address_of(rank: int) -> str:
    """IPv4 address of a worker inside the switched network."""
    return f"10.77.0.{rank + 1}"


def open_tun(name: str) -> int:
    """Create a TUN device in the current namespace; it lives as long as the returned file descriptor."""
    descriptor = os.open("/dev/net/tun", os.O_RDWR | os.O_NONBLOCK)
    fcntl.ioctl(descriptor, _TUNSETIFF, struct.pack("16sH22x", name.encode(), _IFF_TUN | _IFF_NO_PI))
    return descriptor


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)


def enter_namespace(rank: int) -> int:
    """Move this process into a fresh network namespace with a TUN device; returns the device's descriptor.

    Threads that exist already stay where they are, so call it first.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "unshare(CLONE_NEWNET) failed; run as root")
    descriptor = open_tun(DEVICE)
    _ip("link", "set", "lo", "up")
    _ip("address", "add", f"{address_of(rank)}/24", "dev", DEVICE)
    _ip("link", "set", DEVICE, "mtu", str(MTU), "txqueuelen", "10000", "up")
    return descriptor


class DelayQueue:
    """Decides when each packet leaves: pure, the time and the random source are handed in.

    Args:
        draw_s: returns one packet's delay in seconds.
        bytes_per_s: of the wire from one sender to one receiver, where packets queue; 0: no limit.
    """

    def __init__(self, draw_s: Callable[[], float], bytes_per_s: float = 0.0) -> None:
        self._draw_s = draw_s
        self._bytes_per_s = bytes_per_s
        self._wire_free_s: dict[bytes, float] = {}
        self._heap: list[tuple[float, int, int, bytes]] = []
        self._last_release_s: dict[bytes, float] = {}
        self._count = 0

    def put(self, packet: bytes, now_s: float) -> None:
        """Take one IPv4 packet in: bytes 12-19 are source and destination, byte 19 the receiver's rank + 1."""
        pair = packet[12:20]
        sent_s = now_s
        if self._bytes_per_s > 0:
            sent_s = max(now_s, self._wire_free_s.get(pair, 0.0)) + len(packet) / self._bytes_per_s
            self._wire_free_s[pair] = sent_s
        release_s = max(sent_s + self._draw_s(), self._last_release_s.get(pair, 0.0))
        self._last_release_s[pair] = release_s
        self._count += 1
        heapq.heappush(self._heap, (release_s, self._count, packet[19] - 1, packet))

    def next_release_s(self) -> float | None:
        """When the next packet leaves, or None."""
        return self._heap[0][0] if self._heap else None

    def due(self, now_s: float) -> Iterator[tuple[int, bytes]]:
        """Packets to be delivered by now, with the rank they go to."""
        while self._heap and self._heap[0][0] <= now_s:
            _, _, rank, packet = heapq.heappop(self._heap)
            yield rank, packet


def run_switch(devices: list[int], low_s: float, high_s: float, bytes_per_s: float, seed: int) -> None:
    """Forward packets between the devices for ever; a packet's delay is uniform in [low_s, high_s]."""
    generator = random.Random(seed)
    queue = DelayQueue(lambda: generator.uniform(low_s, high_s), bytes_per_s)
    while True:
        release_s = queue.next_release_s()
        timeout = None if release_s is None else max(0.0, release_s - time.monotonic())
        for device in select.select(devices, [], [], timeout)[0]:
            with contextlib.suppress(BlockingIOError):
                while True:
                    packet = os.read(device, 65536)
                    if packet[0] >> 4 == 4 and packet[16:19] == b"\x0a\x4d\x00" and packet[19] <= len(devices):
                        queue.put(packet, time.monotonic())
        for rank, packet in queue.due(time.monotonic()):
            os.write(devices[rank], packet)


def run_jittered(
    num_workers: int,
    work: workers.Work,
    *,
    low_s: float,
    high_s: float,
    bytes_per_s: float = 0.0,
    seed: int = 0,
    timeout_s: float = 300.0,
) -> list[Any]:
    """``workers.run_workers`` with every worker behind the switch, at ``address_of(rank)``.

    The device descriptors travel to the switch over a socket: the switch stays in the parent's namespace.
    """
    sockets = [socket.socketpair() for _ in range(num_workers)]

    def switch() -> None:
        devices = [socket.recv_fds(ours, 1, 1)[1][0] for ours, _ in sockets]
        for ours, _ in sockets:
            ours.sendall(b"!")
        run_switch(devices, low_s, high_s, bytes_per_s, seed)

    def worker(rank: int) -> Any:
        _, theirs = sockets[rank]
        descriptor = enter_namespace(rank)
        socket.send_fds(theirs, [b"?"], [descriptor])
        os.close(descriptor)
        if theirs.recv(1) != b"!":
            raise RuntimeError("The switch ended before it started.")
        os.environ["GLOO_SOCKET_IFNAME"] = DEVICE
        return work(rank)

    switch_process, switch_pipe = workers.fork(switch)
    try:
        return workers.run_workers(num_workers, worker, timeout_s)
    finally:
        workers.end([switch_process])
        os.close(switch_pipe)
        for pair in sockets:
            for end in pair:
                end.close()
