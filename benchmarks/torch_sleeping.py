"""``torch.distributed.pipelining`` over stages that sleep instead of computing: the baseline of emulated runs.

A stage sleeps ``forward_s`` in forward and ``backward_s`` in backward, through an autograd function, and hands
on a tensor of ``[num_values]`` floats per micro-batch.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.pipelining.schedules import ScheduleZBVZeroBubble

from benchmarks.workers import Place
from varuna.testing.emulated import compute_for

TORCH_SCHEDULES = ("1f1b", "gpipe", "zbv")


@dataclass(frozen=True, kw_only=True)
class SleepingPipeline:
    """What every stage costs.

    Attributes:
        num_stages: P, one process each.
        num_micro_batches: N.
        forward_s, backward_s: seconds of one micro-batch in one stage.
        num_values: floats in the activation of one micro-batch.
        slow_stage, slow_factor: this stage takes that many times as long (-1: none).
        recompute: forward runs again before backward (Varuna's engine only).

    Half of ``backward_s`` is for weight gradients, which some schedules put off.
    """

    num_stages: int
    num_micro_batches: int
    forward_s: float
    backward_s: float
    num_values: int
    slow_stage: int = -1
    slow_factor: float = 1.0
    recompute: bool = False

    def factor(self, stage_index: int) -> float:
        """How many times slower this stage is."""
        return self.slow_factor if stage_index == self.slow_stage else 1.0

    @property
    def no_bubble_s(self) -> float:
        """Seconds the busiest stage needs for its own work alone."""
        slowest = max(self.factor(index) for index in range(self.num_stages))
        once_s = self.forward_s * (2 if self.recompute else 1) + self.backward_s
        return self.num_micro_batches * once_s * slowest


class _Sleep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, forward_s: float, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        compute_for(forward_s)
        return x + 0.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        compute_for(ctx.backward_s)
        return grads[0].contiguous(), torch.zeros(1), None, None


class _SleepWeight(torch.autograd.Function):
    """The weight's half of a backward that is split for zero-bubble schedules."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, backward_s: float) -> Tensor:
        ctx.backward_s = backward_s
        return weight + 0.0

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        compute_for(ctx.backward_s)
        return torch.zeros(1), None


class SleepingStage(nn.Module):
    """``x [1, num_values] -> [1, num_values]``; ``split`` divides backward into input and weight halves."""

    def __init__(self, forward_s: float, backward_s: float, *, split: bool = False) -> None:
        super().__init__()
        self.forward_s, self.backward_s, self.split = forward_s, backward_s, split
        self.weight = nn.Parameter(torch.zeros(1))

    def forward(self, x: Tensor) -> Tensor:
        """Sleep, and pass ``x`` on."""
        if not self.split or not x.requires_grad:
            return _Sleep.apply(x, self.weight, self.forward_s, self.backward_s)
        y = _Sleep.apply(x, torch.zeros(1), self.forward_s, self.backward_s / 2)
        return y + _SleepWeight.apply(self.weight, self.backward_s / 2)


@contextmanager
def engine(name: str, place: Place, pipeline: SleepingPipeline) -> Iterator[Callable[[], None]]:
    """Yields a function that runs one step on this rank."""
    address = f"tcp://{place.store_host}:{place.store_port}"
    dist.init_process_group("gloo", init_method=address, rank=place.rank, world_size=pipeline.num_stages)
    try:
        schedule = build_schedule(name, place.rank, pipeline)
        yield lambda: run_schedule(name, schedule, place.rank, pipeline)
    finally:
        dist.destroy_process_group()


def build_schedule(name: str, rank: int, pipeline: SleepingPipeline) -> Any:
    """Torch's schedule object for this rank; ``zbv`` puts two half stages on each, in the shape of a V."""
    virtual = 2 if name == "zbv" else 1
    size = pipeline.num_stages
    indices = [rank] if virtual == 1 else [rank, 2 * size - 1 - rank]
    factor = pipeline.factor(rank) / virtual
    example = torch.zeros(1, pipeline.num_values)
    stages = [
        PipelineStage(
            SleepingStage(pipeline.forward_s * factor, pipeline.backward_s * factor, split=virtual == 2),
            index,
            size * virtual,
            torch.device("cpu"),
            input_args=(example.detach().requires_grad_(index > 0),),
            output_args=(example.detach().requires_grad_(),),
        )
        for index in indices
    ]
    if name == "zbv":
        return ScheduleZBVZeroBubble(stages, pipeline.num_micro_batches, loss_fn=_loss)
    schedule = {"1f1b": Schedule1F1B, "gpipe": ScheduleGPipe}[name]
    return schedule(stages[0], pipeline.num_micro_batches, loss_fn=_loss)


def _loss(output: Tensor, target: Tensor) -> Tensor:
    return output.sum()


def run_schedule(name: str, schedule: Any, rank: int, pipeline: SleepingPipeline) -> None:
    """One step; torch wants the input on the first stage and a target where the loss is."""
    batch = torch.zeros(pipeline.num_micro_batches, pipeline.num_values)
    last = 0 if name == "zbv" else pipeline.num_stages - 1
    target = {"target": batch[:, :1]} if rank == last else {}
    schedule.step(*((batch,) if rank == 0 else ()), return_outputs=False, **target)


def in_flight(name: str, pipeline: SleepingPipeline) -> list[int]:
    """Most micro-batches between forward and backward, per stage; for zbv two half stages count as one."""
    size, count = pipeline.num_stages, pipeline.num_micro_batches
    if name == "gpipe":
        return [count] * size
    if name == "1f1b":
        return [min(size - index, count) for index in range(size)]
    return [min(size, count)] * size
