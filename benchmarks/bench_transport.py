"""Varuna's channels against gloo's send and receive: round trips between two processes, interleaved.

    python -m benchmarks.bench_transport

"busy": one round trip after the other. "after a pause": 5 ms of sleep before each, as between tasks of a stage;
Python then runs from cold caches. gloo's receives are posted by the waiting side, its buffers are reused.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import PrefixStore, ProcessGroupGloo, Store

from varuna.run.channel import StageChannels
from varuna.run.wire import Direction, Message, MessageHeader
from varuna.testing.emulated import open_emulated_channels
from varuna.testing.forked import barrier, run_forked, values_of

SIZES = {4 << 10: 100, 1 << 20: 40, 64 << 20: 4}
ROUNDS = 5
PAUSE_S = 0.005

RoundTrip = Callable[[int, torch.Tensor], None]


def channel_round_trip(rank: int, channels: StageChannels) -> RoundTrip:
    def send(k: int, message: Message, direction: Direction) -> None:
        header = MessageHeader(
            generation=0, step_index=0, micro_batch_index=k, operation="train", direction=direction
        )
        channels.send(header, message)

    def receive(direction: Direction) -> Message:
        mailbox = channels.mailbox
        while True:
            version = mailbox.version
            if mailbox.num_unread(direction):
                return mailbox.take(direction).message
            if mailbox.failure is not None:
                raise mailbox.failure
            mailbox.wait_past(version)

    def round_trip(k: int, tensor: torch.Tensor) -> None:
        if rank == 0:
            send(k, Message(values=(tensor,)), Direction.ACTIVATION)
            receive(Direction.GRADIENT)
        else:
            send(k, receive(Direction.ACTIVATION), Direction.GRADIENT)

    return round_trip


def gloo_round_trip(rank: int, group: dist.ProcessGroup) -> RoundTrip:
    def round_trip(k: int, tensor: torch.Tensor) -> None:
        if rank == 0:
            sent = group.send([tensor], 1, 1)
            group.recv([tensor], 1, 2).wait()
            sent.wait()
        else:
            group.recv([tensor], 0, 1).wait()
            group.send([tensor], 0, 2).wait()

    return round_trip


def measure(rank: int, store: Store) -> dict[str, list[float]]:
    channels = open_emulated_channels(store, rank, 2)
    group = ProcessGroupGloo(PrefixStore("gloo", store), rank, 2, timedelta(seconds=60))
    engines = {"varuna": channel_round_trip(rank, channels), "gloo": gloo_round_trip(rank, group)}
    seconds: dict[str, list[float]] = {}
    for num_bytes, repeats in SIZES.items():
        tensor = torch.zeros(num_bytes, dtype=torch.uint8)
        for round_index in range(ROUNDS):
            for engine, round_trip in engines.items():
                for pause_s in (0.0, PAUSE_S):
                    barrier(store, f"{num_bytes} {round_index} {engine} {pause_s}", 2)
                    times = seconds.setdefault(f"{num_bytes} {engine} {pause_s}", [])
                    for k in range(repeats):
                        time.sleep(pause_s)
                        started_s = time.monotonic()
                        round_trip(k, tensor)
                        times.append(time.monotonic() - started_s)
    barrier(store, "end", 2)
    channels.close()
    return {
        name: [statistics.median(times), statistics.quantiles(times, n=10)[-1]]
        for name, times in seconds.items()
    }


def main() -> None:
    torch.set_num_threads(1)
    measured, _ = values_of(run_forked(2, measure, timeout_s=300))
    assert isinstance(measured, dict)
    print(f"{'bytes':>10} {'regime':15} {'engine':7} {'median ms':>10} {'p90 ms':>8} {'GB/s one way':>13}")
    for num_bytes in SIZES:
        for pause_s, regime in ((0.0, "busy"), (PAUSE_S, "after a pause")):
            for engine in ("varuna", "gloo"):
                median_s, p90_s = measured[f"{num_bytes} {engine} {pause_s}"]
                rate = 2 * num_bytes / median_s / 1e9
                figures = f"{median_s * 1e3:>10.3f} {p90_s * 1e3:>8.3f} {rate:>13.2f}"
                print(f"{num_bytes:>10} {regime:15} {engine:7} {figures}")


if __name__ == "__main__":
    main()
