"""Emulated stages: they sleep instead of computing, so that a pipeline of many stages runs on a small machine.

    times = [StageTimes(forward_s=0.02, backward_s=0.04)] * 4
    schedules = pipeline_schedules("varuna", num_stages=4, num_micro_batches=8, recompute=[False] * 4)
    run = run_emulated_pipeline(schedules, times, activation_bytes=4096)
    run.steps[-1].makespan_s

Everything but the computation is real: the engine, the channels, one process per stage. Assumed: a task takes
its stated time whatever else runs, activations and gradients have the same size, workers are on this machine.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from varuna.errors import ProtocolError
from varuna.plan import StageSchedule, Task, TaskKind
from varuna.plan.simulate import StageTimes, TaskSpan
from varuna.run.channel import StageChannels, open_channels
from varuna.run.connect import ConnectOptions, StageAddress
from varuna.run.engine import StepContext, run_stage
from varuna.run.wire import Message
from varuna.testing.forked import barrier, run_forked, values_of

_WAKE_UP_S = 0.0002
"""Waking up takes some 60 µs, more when many stages wake at once."""


def compute_for(seconds: float) -> None:
    """Take a stated time, as a kernel of a device would: asleep but for the last moment, which a sleep misses
    by what waking up takes.
    """
    end_s = time.perf_counter() + seconds
    time.sleep(max(0.0, seconds - _WAKE_UP_S))
    while time.perf_counter() < end_s:
        time.sleep(0)  # lets this process's other threads run


class EmulatedStage:
    """A ``StageProgram`` that sleeps.

    Args:
        times: seconds per task.
        activation_bytes: size of what it sends, both ways.
        is_first, is_last: the first sends no gradients, the last no activations.

    Attributes:
        peak_in_flight: the most micro-batches that were between forward and backward at one time.
        peak_held: the most sets of activations at one time: from forward (or recompute) to the end of backward,
            weight gradients included.
    """

    def __init__(self, times: StageTimes, *, activation_bytes: int, is_first: bool, is_last: bool) -> None:
        self.peak_in_flight = 0
        self.peak_held = 0
        self._num_in_flight = 0
        self._num_held = 0
        self._times = times
        self._num_bytes = activation_bytes
        self._is_first = is_first
        self._is_last = is_last
        self._message = Message(values=(torch.zeros(activation_bytes, dtype=torch.uint8),))

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        """Sleep ``forward_s``."""
        self._check(received, micro_batch_index, expected=not self._is_first)
        compute_for(self._times.forward_s)
        self._num_in_flight += 1
        self.peak_in_flight = max(self.peak_in_flight, self._num_in_flight)
        if save_activations:
            self._hold()
        return None if self._is_last else self._message

    def recompute(self, micro_batch_index: int) -> None:
        """Sleep ``recompute_s``."""
        compute_for(self._times.of(TaskKind.RECOMPUTE))
        self._hold()

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool
    ) -> Message | None:
        """Sleep ``backward_s``, if ``split`` without ``weight_s``."""
        self._check(gradients, micro_batch_index, expected=not self._is_last)
        compute_for(self._times.of(TaskKind.BACKWARD, split=split))
        self._num_in_flight -= 1
        self._num_held -= not split
        return None if self._is_first else self._message

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        """Sleep ``weight_s``."""
        compute_for(self._times.of(TaskKind.WEIGHT))
        self._num_held -= 1

    def _hold(self) -> None:
        self._num_held += 1
        self.peak_held = max(self.peak_held, self._num_held)

    def _check(self, message: Message | None, micro_batch_index: int, *, expected: bool) -> None:
        sizes = [] if message is None else [0 if value is None else value.nbytes for value in message.values]
        if sizes != [self._num_bytes] * expected:
            raise ProtocolError(
                f"An emulated stage got tensors of {sizes} bytes for micro-batch {micro_batch_index}, expected "
                f"{[self._num_bytes] * expected}."
            )


@dataclass(frozen=True, kw_only=True)
class EmulatedStep:
    """One step of an emulated pipeline.

    Attributes:
        makespan_s: from the start of the first task on any stage to the end of the last one.
        timelines: per stage, its tasks in the order in which they ran, in seconds from the step's first task.
    """

    makespan_s: float
    timelines: tuple[tuple[TaskSpan, ...], ...]


@dataclass(frozen=True, kw_only=True)
class EmulatedRun:
    """What ``run_emulated_pipeline`` measured; peaks are per stage, over all steps."""

    steps: tuple[EmulatedStep, ...]
    peak_in_flight: tuple[int, ...]
    peak_held: tuple[int, ...]


def run_emulated_pipeline(
    schedules: Sequence[StageSchedule],
    times: Sequence[StageTimes],
    *,
    activation_bytes: int,
    num_steps: int = 1,
    timeout_s: float = 120.0,
) -> EmulatedRun:
    """Run one pipeline, one forked process per stage, all starting each step together.

    Args:
        schedules: one per stage.
        times: one per stage.
        activation_bytes: size of each message.
        num_steps: steps to run; the first one warms up connections.
        timeout_s: after which all processes are killed.

    Raises:
        AssertionError: a stage failed; the message holds its traceback.
    """

    def work(rank: int, store: Store) -> object:
        return _run_stage_process(
            rank, store, schedules[rank], times[rank], activation_bytes=activation_bytes, num_steps=num_steps
        )

    results = values_of(run_forked(len(schedules), work, timeout_s=timeout_s))
    return _collect(results, num_steps)


def open_emulated_channels(store: Store, rank: int, num_stages: int, *, generation: int = 0) -> StageChannels:
    """Channels of stage ``rank`` of a pipeline whose stage i is worker i, over loopback."""
    place = StageAddress(
        rank=rank,
        stage_index=rank,
        previous_rank=rank - 1 if rank > 0 else None,
        next_rank=rank + 1 if rank < num_stages - 1 else None,
    )
    options = ConnectOptions(generation=generation, token=b"emulated", host="127.0.0.1")
    return open_channels(store, place, options)


def _run_stage_process(
    rank: int,
    store: Store,
    schedule: StageSchedule,
    times: StageTimes,
    *,
    activation_bytes: int,
    num_steps: int,
) -> object:
    # By default Linux may end a sleep 50 µs late to save wake-ups; a task shall take its stated time.
    Path("/proc/self/timerslack_ns").write_text("1")
    stage = EmulatedStage(
        times, activation_bytes=activation_bytes, is_first=schedule.is_first, is_last=schedule.is_last
    )
    channels = None if schedule.num_stages == 1 else open_emulated_channels(store, rank, schedule.num_stages)
    steps = []
    for step_index in range(num_steps):
        context = StepContext(
            generation=0,
            step_index=step_index,
            operation="train",
            first_micro_batch=0,
            rank=rank,
            stage_index=rank,
        )
        barrier(store, f"step/{step_index}", schedule.num_stages)
        trace = run_stage(stage, schedule, channels, context=context, record_trace=True)
        assert trace is not None
        offset_s = trace.started_s
        steps.append(
            [
                (
                    span.task.kind.value,
                    span.task.micro_batch_index,
                    offset_s + span.start_s,
                    offset_s + span.end_s,
                )
                for span in trace.spans
            ]
        )
    if channels is not None:
        barrier(store, "end", schedule.num_stages)
        channels.close()
    return {"steps": steps, "peak_in_flight": stage.peak_in_flight, "peak_held": stage.peak_held}


def _collect(results: list[object], num_steps: int) -> EmulatedRun:
    stages = [result for result in results if isinstance(result, dict)]
    assert len(stages) == len(results)
    steps = []
    for step_index in range(num_steps):
        rows = [stage["steps"][step_index] for stage in stages]
        started_s = min(row[0][2] for row in rows)
        timelines = tuple(
            tuple(
                TaskSpan(
                    task=Task(TaskKind(kind), micro_batch_index),
                    start_s=start_s - started_s,
                    end_s=end_s - started_s,
                )
                for kind, micro_batch_index, start_s, end_s in row
            )
            for row in rows
        )
        makespan_s = max(span.end_s for timeline in timelines for span in timeline)
        steps.append(EmulatedStep(makespan_s=makespan_s, timelines=timelines))
    return EmulatedRun(
        steps=tuple(steps),
        peak_in_flight=tuple(int(stage["peak_in_flight"]) for stage in stages),
        peak_held=tuple(int(stage["peak_held"]) for stage in stages),
    )
