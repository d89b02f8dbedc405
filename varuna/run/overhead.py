"""Measures what the engine itself takes per task: it runs tasks that do nothing."""

from __future__ import annotations

import statistics
import time

from varuna.plan import stage_schedule
from varuna.run.engine import Message, StepContext, run_stage

_NUM_MICRO_BATCHES = 32
_NUM_REPEATS = 3


class _Idle:
    """A stage program without work."""

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        """Nothing."""

    def recompute(self, micro_batch_index: int) -> None:
        """Nothing."""

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool = False
    ) -> Message | None:
        """Nothing."""

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        """Nothing."""


def task_overhead_s() -> float:
    """Seconds that the engine adds to each task."""
    schedule = stage_schedule(
        "1f1b", num_stages=1, stage_index=0, num_micro_batches=_NUM_MICRO_BATCHES, recompute=[False]
    )
    context = StepContext(generation=-1, step_index=0, operation="measure", first_micro_batch=0)
    seconds = []
    for _ in range(1 + _NUM_REPEATS):
        started_s = time.perf_counter()
        run_stage(_Idle(), schedule, None, context=context)
        seconds.append(time.perf_counter() - started_s)
    return statistics.median(seconds[1:]) / (2 * _NUM_MICRO_BATCHES)
