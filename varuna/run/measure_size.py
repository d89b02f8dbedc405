"""One micro-batch size of a chain of sections, timed pass by pass; what that says of each kind of section."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from varuna.plan.profile import TaskCosts
from varuna.run.measure_jitter import HELD_UP, TimedPass
from varuna.run.measure_pass import (
    Batch,
    Chain,
    SectionBytes,
    SectionTimes,
    split_pass,
    timed_pass,
    timed_recompute,
)

_SHORTEST_S = 1e-7


@dataclass(kw_only=True)
class Samples:
    """What was measured of one kind at one micro-batch size, all its sections together."""

    times: list[SectionTimes] = field(default_factory=list)
    sizes: list[SectionBytes] = field(default_factory=list)


@dataclass(frozen=True, kw_only=True)
class SizeRun:
    """What runs, and what was found so far: of each position in the chain, and of whole passes."""

    chain: Chain
    batch: Batch
    kinds: Sequence[int]
    sizes: Sequence[SectionBytes]
    times: Sequence[SectionTimes]
    passes: list[TimedPass] = field(default_factory=list)

    @property
    def num_passes(self) -> int:
        """Timed so far."""
        return len(self.passes)

    def time_once(self, *, split: bool) -> None:
        """One more pass; with ``split`` another one with backward in two parts, in the first of each kind."""
        timed_pass(self.chain, self.batch, self.times)
        seconds = sum(taken.forward_s[-1] + taken.backward_s[-1] for taken in self.times)
        self.passes.append(TimedPass(ended_s=time.monotonic(), seconds=seconds))
        if any(section.mutated_buffers for section in self.chain.sections):
            timed_recompute(self.chain, self.batch, self.times)
        if split:
            first = [self.kinds.index(kind) for kind in sorted(set(self.kinds))]
            for index, kept in split_pass(self.chain, self.batch, first, self.times).items():
                self.sizes[index].weight_bytes = kept

    @property
    def samples(self) -> dict[int, Samples]:
        """By kind."""
        found: dict[int, Samples] = {}
        for kind, taken, held in zip(self.kinds, self.times, self.sizes, strict=True):
            samples = found.setdefault(kind, Samples())
            samples.times.append(taken)
            samples.sizes.append(held)
        return found


def costs_of(size: int, samples: Samples) -> TaskCosts:
    """Costs of a kind of section at one micro-batch size."""
    forward_s = _typical(samples.times, lambda times: times.forward_s)
    recompute = [times for times in samples.times if times.recompute_s]
    shares = [share for times in samples.times for share in times.weight_share]
    backward_s = _typical(samples.times, lambda times: times.backward_s)
    share = statistics.median(shares) if shares else 0.0
    return TaskCosts(
        micro_batch_size=size,
        forward_s=forward_s,
        recompute_s=_typical(recompute, lambda times: times.recompute_s) if recompute else forward_s,
        backward_s=backward_s,
        weight_s=backward_s * share,
        split_s=backward_s * _excess(samples.times),
        activation_bytes=max(held.activation_bytes for held in samples.sizes),
        weight_bytes=max(held.weight_bytes for held in samples.sizes),
        workspace_bytes=round(statistics.median(held.workspace_bytes for held in samples.sizes)),
        output_bytes=max(held.output_bytes for held in samples.sizes),
        gradient_bytes=max(held.gradient_bytes for held in samples.sizes),
    )


def _excess(times: Sequence[SectionTimes]) -> float:
    """By which share a split backward takes longer than a whole one of the same section."""
    ratios = [
        statistics.median(one.split_s) / max(_SHORTEST_S, statistics.median(one.backward_s))
        for one in times
        if one.split_s
    ]
    return max(0.0, statistics.median(ratios) - 1) if ratios else 0.0


def _typical(times: Sequence[SectionTimes], part: Callable[[SectionTimes], list[float]]) -> float:
    """What a step's many tasks take on average: the mean, without the few that something else held up."""
    seconds = [second for one in times for second in part(one)]
    limit_s = HELD_UP * statistics.median(seconds)
    return max(_SHORTEST_S, statistics.fmean(second for second in seconds if second <= limit_s))
