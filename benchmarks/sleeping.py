"""Runs one pipeline of sleeping stages under one engine, over loopback or behind the jittering switch."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

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
    """Loopback if ``high_s`` is 0; otherwise a delay per message, uniform in [low_s, high_s], one way."""

    low_s: float = 0.0
    high_s: float = 0.0

    @property
    def is_switched(self) -> bool:
        """Whether messages go through the user-space switch."""
        return self.high_s > 0


_ENGINES = {"torch": torch_sleeping.engine, "varuna": varuna_sleeping.engine}


def makespan_s(variant: Variant, pipeline: SleepingPipeline, network: Network, *, rounds: int = 3) -> float:
    """Median seconds of a step over all stages, after one step of warm-up, in fresh processes."""
    port = workers.free_port()
    line = workers.StartLine(pipeline.num_stages)

    def work(rank: int) -> list[list[float]]:
        torch.set_num_threads(1)
        address_of = switch.address_of if network.is_switched else lambda rank: "127.0.0.1"
        place = workers.Place(rank=rank, host=address_of(rank), store_host=address_of(0), store_port=port)
        with _ENGINES[variant.engine](variant.schedule, place, pipeline) as run_once:
            spans = []
            for round_index in range(rounds + 1):
                start = line.start(rank, round_index + 1)
                run_once()
                spans.append([start, time.monotonic()])
            line.start(rank, rounds + 2)
        return spans[1:]

    if network.is_switched:
        spans = switch.run_jittered(pipeline.num_stages, work, low_s=network.low_s, high_s=network.high_s)
    else:
        spans = workers.run_workers(pipeline.num_stages, work)
    return statistics.median(
        max(of_worker[index][1] for of_worker in spans) - min(of_worker[index][0] for of_worker in spans)
        for index in range(rounds)
    )
