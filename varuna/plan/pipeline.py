"""One step of one pipeline in numbers: arrays in, times and peaks out, fast (``kernel.py``).

What is assumed, the same as in ``simulate.simulate_step``, which takes arbitrary functions for durations and is
what this is tested against:

- A stage does one task at a time and starts it the moment the rule names it.
- A message leaves when its task ends, keeps its sender from computing for ``send_s``, occupies its channel for
  ``transmit_s``, and arrives ``latency_s`` and a drawn delay after that, but never before an earlier message of
  the same channel. The two directions of a link do not disturb each other.
- Nothing else takes time. Seconds throughout.

Importing this imports numba, which takes some tenths of a second; engine and workers do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from varuna.plan.kernel import NUM_KINDS, Floats, Ints, run_compiled
from varuna.plan.schedule import TASK_KINDS, StageSchedule
from varuna.plan.simulate import TaskSpan
from varuna.spec import Task

NO_DELAYS: Floats = np.zeros((0, 0, 0))


@dataclass(frozen=True, kw_only=True)
class PipelineArrays:
    """One pipeline as numbers. P stages, N micro-batches, of which the last may be short.

    Attributes:
        num_micro_batches: N.
        rules: [P, 6] whole numbers, see ``rules_of``.
        durations_s: [P, 2, 5] by stage, whether it is the last micro-batch, kind of task (as ``decide``).
        transmit_s: [P, 2, 2] by sending stage, direction (activations, gradients), whether it is the last.
        latency_s: [P, 2] by sending stage and direction.
        send_s: [P, 2] likewise.
        delays_s: [P, 2, N] drawn extra delay of each message; ``NO_DELAYS`` for none.
        start_s: [P] when each stage begins.
        kept_bytes: [P, 3] what a micro-batch keeps in flight; what a recomputed set adds; what stays from a
            split backward for the weight task. Only ``PipelineRun.peak_bytes`` depends on it.
    """

    num_micro_batches: int
    rules: Ints
    durations_s: Floats
    transmit_s: Floats
    latency_s: Floats
    send_s: Floats
    delays_s: Floats
    start_s: Floats
    kept_bytes: Floats


@dataclass(frozen=True, kw_only=True)
class PipelineRun:
    """What a simulated step of one pipeline did.

    Attributes:
        makespan_s: from time 0 to the end of the last task.
        end_s, busy_s: [P] end of a stage's last task, seconds of its tasks.
        peak_in_flight, peak_recomputed, peak_held: [P] as in ``Simulation``.
        peak_waiting: [P, 2] most activations that had arrived, and no forward had begun on, while a task ran;
            most gradients that had arrived, and no backward had ended on.
        peak_bytes: [P] most of ``kept_bytes`` at one time.
        spans: per stage, if recorded.
    """

    makespan_s: float
    end_s: Floats
    busy_s: Floats
    peak_in_flight: Ints
    peak_recomputed: Ints
    peak_held: Ints
    peak_waiting: Ints
    peak_bytes: Floats
    spans: tuple[tuple[TaskSpan, ...], ...] = ()


def rules_of(schedules: Sequence[StageSchedule]) -> Ints:
    """[P, 6]: warm_up, low_in_flight, max_in_flight, max_held, recompute, split of every stage."""
    return np.array(
        [
            (
                schedule.warm_up,
                schedule.low_in_flight,
                schedule.max_in_flight,
                schedule.max_held,
                schedule.recompute,
                schedule.split,
            )
            for schedule in schedules
        ],
        dtype=np.int64,
    )


def draw_delays(
    quantiles: Sequence[Sequence[float]], num_micro_batches: int, seed: int | Sequence[int]
) -> Floats:
    """[P, 2, N] delays, drawn for each channel from its own evenly spaced quantiles; a seed repeats them.

    Args:
        quantiles: of 2·P channels, stage by stage, activations before gradients; an empty one draws zeros.
        num_micro_batches: N.
        seed: of the generator.
    """
    uniform = np.random.default_rng(seed).random((len(quantiles), num_micro_batches))
    delays = np.zeros_like(uniform)
    for index, values in enumerate(quantiles):
        if len(values) > 0:
            delays[index] = np.interp(uniform[index], np.linspace(0.0, 1.0, len(values)), values)
    return delays.reshape(len(quantiles) // 2, 2, num_micro_batches)


def run_pipeline(arrays: PipelineArrays, *, record: bool = False) -> PipelineRun:
    """Simulate one step; ``record`` keeps the spans."""
    num_stages = len(arrays.rules)
    times_s = np.zeros((num_stages, 2))
    peaks = np.zeros((num_stages, 5), dtype=np.int64)
    peak_bytes = np.zeros(num_stages)
    num_tasks = arrays.num_micro_batches * (NUM_KINDS - 1) if record else 0
    spans_s = np.zeros((num_stages, num_tasks, 2))
    codes = np.zeros((num_stages, num_tasks), dtype=np.int64)
    makespan_s = run_compiled(
        arrays.num_micro_batches,
        arrays.rules,
        arrays.durations_s,
        arrays.transmit_s,
        arrays.latency_s,
        arrays.send_s,
        arrays.delays_s,
        arrays.start_s,
        arrays.kept_bytes,
        times_s,
        peaks,
        peak_bytes,
        spans_s,
        codes,
    )
    assert makespan_s >= 0, f"The stages wait for each other: rules {arrays.rules.tolist()}"
    return PipelineRun(
        makespan_s=makespan_s,
        end_s=times_s[:, 0],
        busy_s=times_s[:, 1],
        peak_in_flight=peaks[:, 0],
        peak_recomputed=peaks[:, 1],
        peak_held=peaks[:, 2],
        peak_waiting=peaks[:, 3:],
        peak_bytes=peak_bytes,
        spans=_spans(spans_s, codes) if record else (),
    )


def fast_makespan(arrays: PipelineArrays) -> float:
    """``run_pipeline(arrays).makespan_s``, for a search: 3 µs and about 50 ns for each task."""
    return run_pipeline(arrays).makespan_s


def _spans(spans_s: Floats, codes: Ints) -> tuple[tuple[TaskSpan, ...], ...]:
    timelines = []
    for times, kinds in zip(spans_s.tolist(), codes.tolist(), strict=True):
        done = [0] * NUM_KINDS
        timeline = []
        for (start_s, end_s), code in zip(times, kinds, strict=True):
            kind = TASK_KINDS[code]
            if kind is None:
                break
            timeline.append(TaskSpan(task=Task(kind, done[code]), start_s=start_s, end_s=end_s))
            done[code] += 1
        timelines.append(tuple(timeline))
    return tuple(timelines)
