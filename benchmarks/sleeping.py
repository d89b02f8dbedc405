"""Runs one pipeline of sleeping stages under one engine, over loopback or behind the jittering switch."""

from __future__ import annotations

import random
import statistics
import time
from dataclasses import dataclass
from typing import Any

import torch

from benchmarks import switch, torch_sleeping, varuna_sleeping, workers
from benchmarks.torch_sleeping import SleepingPipeline


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One engine with one of its schedules, e.g. ``torch 1f1b``."""

    engine: str
    schedule: str

    def __str__(self) -> str:
        return f"{self.engine} {self.schedule}"


@dataclass(frozen=True, kw_only=True)
class Network:
    """Loopback if ``high_s`` is 0; otherwise a delay per message, uniform in [low_s, high_s], one way.

    ``bytes_per_s`` is the rate from one worker to another; 0 is no limit.
    """

    low_s: float = 0.0
    high_s: float = 0.0
    bytes_per_s: float = 0.0

    @property
    def is_switched(self) -> bool:
        """Whether messages go through the user-space switch."""
        return self.high_s > 0


_ENGINES = {"torch": torch_sleeping.engine, "varuna": varuna_sleeping.engine}


def run_on(network: Network, num_workers: int, work: workers.Work) -> list[Any]:
    """Run ``work(rank)`` in as many processes on this network; their results."""
    if not network.is_switched:
        return workers.run_workers(num_workers, work)
    return switch.run_jittered(
        num_workers,
        work,
        low_s=network.low_s,
        high_s=network.high_s,
        bytes_per_s=network.bytes_per_s,
        seed=random.getrandbits(32),  # other delays in every launch
    )


def place_on(network: Network, rank: int, store_port: int) -> workers.Place:
    """Where a worker is on this network."""
    if not network.is_switched:
        return workers.Place(rank=rank, host="127.0.0.1", store_host="127.0.0.1", store_port=store_port)
    hosts = switch.address_of(rank), switch.address_of(0)
    return workers.Place(rank=rank, host=hosts[0], store_host=hosts[1], store_port=store_port)


def makespan_s(variant: Variant, pipeline: SleepingPipeline, network: Network, *, rounds: int = 3) -> float:
    """Median seconds of a step over all stages, after one step of warm-up, in fresh processes."""
    port = workers.free_port()
    line = workers.StartLine(pipeline.num_stages)

    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        place = place_on(network, rank, port)
        with _ENGINES[variant.engine](variant.schedule, place, pipeline) as run_once:
            spans = []
            for round_index in range(rounds + 1):
                start = line.start(rank, round_index + 1)
                run_once()
                spans.append([start, time.monotonic()])
            line.start(rank, rounds + 2)
        return spans[1:]

    spans = run_on(network, pipeline.num_stages, work)
    return statistics.median(
        max(of_worker[index][1] for of_worker in spans) - min(of_worker[index][0] for of_worker in spans)
        for index in range(rounds)
    )
