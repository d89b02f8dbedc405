"""One stage through one step, with real channels: order, values, every way to fail, and sixteen stages."""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
import torch
from torch.distributed import Store

from tests.run.pipes import address_of, nothing_leaks, options, pipeline  # noqa: F401
from varuna.errors import LossError, PeerLost, ProtocolError, WorkerFailed
from varuna.failure import place_of
from varuna.plan import SCHEDULES, StageSchedule, TaskKind, pipeline_schedules
from varuna.plan.simulate import StageTimes, ideal_makespan
from varuna.run.channel import StageChannels, open_channels
from varuna.run.engine import (
    MAX_UNSENT,
    Message,
    StageProgram,
    StageTrace,
    StepContext,
    run_forward_only,
    run_stage,
)
from varuna.testing.emulated import run_emulated_pipeline
from varuna.testing.forked import barrier, run_forked, values_of

AT_ONCE_S = 10.0
FIRST = 100  # the pipeline's first micro-batch in the global batch


def context_of(rank: int = 0, **changes: object) -> StepContext:
    base = StepContext(
        generation=7, step_index=3, operation="train", first_micro_batch=FIRST, rank=rank, stage_index=rank
    )
    return replace(base, **changes)  # type: ignore[arg-type]


class AddingStage:
    """Adds 1 to what it receives going forward, and multiplies by 2 going back; notes what it was asked."""

    def __init__(self, schedule: StageSchedule) -> None:
        self.schedule = schedule
        self.calls: list[tuple[str, int, bool]] = []
        self.results: dict[int, float] = {}

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        self.calls.append(("F", micro_batch_index, save_activations))
        if received is None:
            values: tuple[torch.Tensor | None, ...] = (torch.tensor(float(micro_batch_index)), None)
        else:
            assert received.values[0] is not None
            assert received.signature == f"signature {micro_batch_index}"
            values = (received.values[0] + 1, None)
        if self.schedule.is_last:
            assert values[0] is not None
            self.results[micro_batch_index] = values[0].item()
            return None
        return Message(values=values, signature=f"signature {micro_batch_index}")

    def recompute(self, micro_batch_index: int) -> None:
        self.calls.append(("R", micro_batch_index, True))

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool
    ) -> Message | None:
        assert split == self.schedule.split
        self.calls.append(("B", micro_batch_index, is_final))
        if gradients is None:
            value = torch.tensor(float(micro_batch_index))
        else:
            assert gradients.values[1] is None
            assert gradients.values[0] is not None
            value = gradients.values[0] * 2
        if self.schedule.is_first:
            self.results[micro_batch_index] = value.item()
            return None
        return Message(values=(value, None))

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        self.calls.append(("W", micro_batch_index, is_final))


def schedules_of(
    name: str, num_stages: int, num_micro_batches: int, *, recompute: bool = False
) -> tuple[StageSchedule, ...]:
    return pipeline_schedules(
        name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        recompute=[recompute] * num_stages,
    )


# --- order and values ---------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 4])
@pytest.mark.parametrize("name", SCHEDULES)
def test_values_and_order(name: str, num_stages: int, recompute: bool) -> None:
    num_micro_batches = 7
    schedules = schedules_of(name, num_stages, num_micro_batches, recompute=recompute)
    programs = [AddingStage(schedule) for schedule in schedules]

    def run_all(channels: Sequence[StageChannels | None]) -> list[StageTrace]:
        def run(rank: int) -> StageTrace:
            trace = run_stage(
                programs[rank], schedules[rank], channels[rank], context=context_of(rank), record_trace=True
            )
            assert trace is not None
            return trace

        with ThreadPoolExecutor(num_stages) as pool:
            return list(pool.map(run, range(num_stages)))

    if num_stages == 1:
        traces = run_all([None])
    else:
        with pipeline(num_stages) as channels:
            traces = run_all(channels)

    ks = range(FIRST, FIRST + num_micro_batches)
    if num_stages > 1:
        assert programs[-1].results == {k: k + num_stages - 1 for k in ks}
        assert programs[0].results == {k: k * 2.0 ** (num_stages - 1) for k in ks}
    for program, schedule, trace in zip(programs, schedules, traces, strict=True):
        by_kind = {kind: [call for call in program.calls if call[0] == kind] for kind in "FRBW"}
        assert by_kind["F"] == [("F", k, not schedule.recompute) for k in ks]
        assert by_kind["R"] == ([("R", k, True) for k in ks] if schedule.recompute else [])
        assert by_kind["B"] == [("B", k, k == ks[-1]) for k in ks]
        assert by_kind["W"] == ([("W", k, k == ks[-1]) for k in ks] if schedule.split else [])
        assert not schedule.split or program.calls[-1][0] == "W"
        called = [f"{kind}{k - FIRST}" for kind, k, _ in program.calls]
        assert [str(span.task) for span in trace.spans] == called
        if not schedule.opportunistic:
            assert called == [str(task) for task in schedule.order]
        ends = [span.end_s for span in trace.spans]
        assert ends == sorted(ends)


def test_a_neighbour_that_is_a_step_ahead_disturbs_nothing() -> None:
    schedules = schedules_of("varuna", 3, 5)
    programs = [AddingStage(schedule) for schedule in schedules]
    with pipeline(3) as channels:

        def run(rank: int) -> None:
            for step_index in range(20):
                run_stage(
                    programs[rank],
                    schedules[rank],
                    channels[rank],
                    context=context_of(rank, step_index=step_index),
                )

        with ThreadPoolExecutor(3) as pool:
            list(pool.map(run, range(3)))
    assert [len(program.calls) for program in programs] == [200] * 3


def test_training_and_evaluation_take_turns_on_the_same_channels() -> None:
    schedules = schedules_of("1f1b", 2, 3)
    programs = [AddingStage(schedule) for schedule in schedules]
    with pipeline(2) as channels:

        def run(rank: int) -> None:
            for index in range(3):
                run_stage(
                    programs[rank], schedules[rank], channels[rank], context=context_of(rank, step_index=index)
                )
                run_forward_only(
                    programs[rank],
                    channels[rank],
                    context=context_of(rank, step_index=index, operation="evaluate"),
                    num_stages=2,
                    stage_index=rank,
                    num_micro_batches=4,
                )

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))
    assert [call for call in programs[1].calls if call[0] == "F"][-4:] == [
        ("F", FIRST + index, False) for index in range(4)
    ]


def test_evaluation_runs_only_a_bounded_number_of_messages_ahead() -> None:
    """Nothing flows back in evaluation: what holds the first stage is that its messages are not read."""
    num_micro_batches, max_unread = 60, 2
    made: list[int] = []
    peaks: list[int] = []

    class Maker(AddingStage):
        def forward(
            self, micro_batch_index: int, received: Message | None, *, save_activations: bool
        ) -> Message | None:
            made.append(micro_batch_index)
            return Message(values=(torch.zeros(8 << 20, dtype=torch.uint8),))

    class Taker(AddingStage):
        def forward(
            self, micro_batch_index: int, received: Message | None, *, save_activations: bool
        ) -> Message | None:
            peaks.append(len(made) - (micro_batch_index - FIRST))
            return None

    schedules = schedules_of("gpipe", 2, num_micro_batches)
    programs = [Maker(schedules[0]), Taker(schedules[1])]
    with pipeline(2, max_unread=max_unread) as channels:

        def run(rank: int) -> None:
            run_forward_only(
                programs[rank],
                channels[rank],
                context=context_of(rank, operation="evaluate"),
                num_stages=2,
                stage_index=rank,
                num_micro_batches=num_micro_batches,
            )

        with ThreadPoolExecutor(2) as pool:
            list(pool.map(run, range(2)))
    assert len(peaks) == num_micro_batches
    # one being made, MAX_UNSENT queued, two or so in the kernel (8 MB each), one being read, max_unread read
    assert max(peaks) <= 1 + MAX_UNSENT + 2 + 1 + max_unread + 1


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_sixteen_processes_drain(name: str, recompute: bool) -> None:
    num_stages, num_micro_batches = 16, 32
    schedules = schedules_of(name, num_stages, num_micro_batches, recompute=recompute)
    times = [StageTimes(forward_s=0.0, backward_s=0.0)] * num_stages
    run = run_emulated_pipeline(schedules, times, activation_bytes=1000, timeout_s=60)
    for schedule, peak in zip(schedules, run.peak_held, strict=True):
        assert peak <= (schedule.max_held if schedule.split else schedule.max_in_flight)
    for schedule, timeline, peak in zip(schedules, run.steps[0].timelines, run.peak_in_flight, strict=True):
        assert len(timeline) == num_micro_batches * (2 + schedule.recompute + schedule.split)
        assert peak <= schedule.max_in_flight
        if not schedule.opportunistic:
            assert tuple(span.task for span in timeline) == schedule.order


@pytest.mark.parametrize("name", ["1f1b", "zero-bubble"])
def test_emulated_stages_take_their_stated_time(name: str) -> None:
    times = [StageTimes(forward_s=0.02, backward_s=0.04, weight_s=0.015)] * 3
    run = run_emulated_pipeline(schedules_of(name, 3, 4), times, activation_bytes=100, num_steps=2)
    work_s = 4 * (0.02 + 0.04)
    ideal_s = ideal_makespan("1f1b", times=times, num_micro_batches=4, recompute=[False] * 3)
    assert all(work_s < step.makespan_s < 3 * ideal_s for step in run.steps)
    if name == "1f1b":
        assert all(step.makespan_s >= ideal_s for step in run.steps)
    backward_s = 0.025 if name == "zero-bubble" else 0.04
    least_s = {TaskKind.FORWARD: 0.02, TaskKind.BACKWARD: backward_s, TaskKind.WEIGHT: 0.015}
    for span in run.steps[1].timelines[1]:
        assert span.end_s - span.start_s >= least_s[span.task.kind]


# --- errors -------------------------------------------------------------------------------------


class FailingStage(AddingStage):
    """Raises ``error`` in one call."""

    def __init__(self, schedule: StageSchedule, operation: str, index: int, error: Exception) -> None:
        super().__init__(schedule)
        self.at = (operation, FIRST + index)
        self.error = error

    def _maybe_fail(self, operation: str, micro_batch_index: int) -> None:
        if (operation, micro_batch_index) == self.at:
            raise self.error

    def forward(
        self, micro_batch_index: int, received: Message | None, *, save_activations: bool
    ) -> Message | None:
        self._maybe_fail("forward", micro_batch_index)
        return super().forward(micro_batch_index, received, save_activations=save_activations)

    def recompute(self, micro_batch_index: int) -> None:
        self._maybe_fail("recompute", micro_batch_index)

    def backward(
        self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool
    ) -> Message | None:
        self._maybe_fail("backward", micro_batch_index)
        return super().backward(micro_batch_index, gradients, is_final=is_final, split=split)

    def weight_gradients(self, micro_batch_index: int, *, is_final: bool) -> None:
        self._maybe_fail("weight gradients", micro_batch_index)


@pytest.mark.parametrize("operation", ["forward", "recompute", "backward", "weight gradients"])
def test_an_exception_in_user_code_is_placed_and_reaches_every_stage(operation: str) -> None:
    name = "zero-bubble" if operation == "weight gradients" else "gpipe"
    schedules = schedules_of(name, 3, 4, recompute=True)
    cause = ValueError("no such luck")
    programs: list[StageProgram] = [AddingStage(schedule) for schedule in schedules]
    programs[1] = FailingStage(schedules[1], operation, 2, cause)
    with pipeline(3) as channels:

        def run(rank: int) -> Exception | None:
            try:
                run_stage(
                    programs[rank], schedules[rank], channels[rank], context=context_of(rank, pipeline_index=5)
                )
            except (WorkerFailed, PeerLost) as error:
                channels[rank].close(str(error))
                return error
            return None

        with ThreadPoolExecutor(3) as pool:
            left, failed, right = pool.map(run, range(3))
    assert isinstance(failed, WorkerFailed)
    assert failed.__cause__ is cause
    assert str(failed).startswith(
        f"ValueError in {operation} of micro-batch 102, step 3 (train), on worker 1 (pipeline 5, stage 1, "
    )
    assert str(failed).endswith("): no such luck")
    place = place_of(failed)
    assert (place.operation, place.micro_batch_index, place.stage_index, place.pipeline_index) == (
        operation,
        102,
        1,
        5,
    )
    # All that the last stage needs may have reached it before a backward fails in the middle, and all that both
    # need before weight gradients do.
    lost = [left] if right is None and operation != "forward" else [left, right]
    if operation == "weight gradients":
        lost = [error for error in (left, right) if error is not None]
    for error in lost:
        assert isinstance(error, PeerLost)
        assert "Worker 1 (stage 1, 127.0.0.1:" in str(error)
        assert "no such luck" in str(error)


def test_errors_of_varuna_keep_their_type() -> None:
    (schedule,) = schedules_of("1f1b", 1, 2)
    program = FailingStage(schedule, "forward", 1, LossError("a loss of shape (3,)"))
    with pytest.raises(LossError) as caught:
        run_stage(program, schedule, None, context=context_of())
    assert "micro-batch 101, forward" in caught.value.__notes__[0]


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"generation": 8}, "generation 8"),
        ({"step_index": 4}, "step 4"),
        ({"first_micro_batch": 0}, "micro-batch 0"),
        ({"operation": "evaluate"}, "evaluate activation"),
    ],
)
def test_a_message_of_something_else_is_refused(changes: dict[str, object], text: str) -> None:
    """For example one worker is in ``evaluate()`` while the other trains."""
    schedules = schedules_of("1f1b", 2, 2)
    with pipeline(2) as channels:

        def run(rank: int) -> Exception:
            context = context_of(rank, **(changes if rank == 0 else {}))
            try:
                run_stage(AddingStage(schedules[rank]), schedules[rank], channels[rank], context=context)
            except (ProtocolError, PeerLost) as error:
                channels[rank].close(str(error))
                return error
            raise AssertionError(f"stage {rank} did not fail")

        with ThreadPoolExecutor(2) as pool:
            left, right = pool.map(run, range(2))
    assert isinstance(right, ProtocolError)
    assert "expected train activation of micro-batch 100, step 3, generation 7" in str(right)
    assert "Worker 0 (stage 0, 127.0.0.1:" in str(right)
    assert text in str(right)
    assert isinstance(left, PeerLost)
    assert "expected train activation" in str(left)


def test_a_neighbour_that_closes_early_is_lost_not_waited_for() -> None:
    schedules = schedules_of("1f1b", 2, 2)
    with pipeline(2) as channels:
        channels[0].close()
        with pytest.raises(PeerLost) as caught:
            run_stage(AddingStage(schedules[1]), schedules[1], channels[1], context=context_of(1))
    assert "was waiting for activation of micro-batch 100 in step 3 (train), generation 7" in str(caught.value)


def test_abort_ends_a_waiting_stage() -> None:
    schedules = schedules_of("varuna", 2, 2)
    with pipeline(2) as channels, ThreadPoolExecutor(1) as pool:
        running = pool.submit(
            run_stage, AddingStage(schedules[1]), schedules[1], channels[1], context=context_of(1)
        )
        channels[1].abort("generation 8 begins")
        error = running.exception(AT_ONCE_S)
    assert isinstance(error, PeerLost)
    assert "generation 8 begins" in str(error)


@pytest.mark.parametrize("name", SCHEDULES)
def test_a_worker_killed_in_mid_step_is_noticed_by_all_at_once(name: str) -> None:
    """SIGKILL in stage 2 of 4 at its third backward; others hear of it from neighbour to neighbour."""
    schedules = schedules_of(name, 4, 6)

    class Dying(AddingStage):
        def backward(
            self, micro_batch_index: int, gradients: Message | None, *, is_final: bool, split: bool
        ) -> Message | None:
            if micro_batch_index == FIRST + 2:
                os.kill(os.getpid(), signal.SIGKILL)
            return super().backward(micro_batch_index, gradients, is_final=is_final, split=split)

    def work(rank: int, store: Store) -> object:
        channels = open_channels(store, address_of(rank, 4), options())
        program = (Dying if rank == 2 else AddingStage)(schedules[rank])
        barrier(store, "ready", 4)

        def run_two_steps() -> None:  # a stage that was through already hears of it in its next step
            for step_index in range(2):
                context = context_of(rank, step_index=step_index)
                run_stage(program, schedules[rank], channels, context=context)

        started_s = time.monotonic()
        with pytest.raises(PeerLost) as caught:
            run_two_steps()
        duration_s = time.monotonic() - started_s
        channels.close(str(caught.value))
        return [str(caught.value), duration_s]

    outcomes = run_forked(4, work, timeout_s=30)
    assert outcomes[2].exit_code == -signal.SIGKILL
    for rank in (0, 1, 3):
        (result,) = values_of((outcomes[rank],))
        assert isinstance(result, list)
        assert "Worker 2 (stage 2, 127.0.0.1:" in result[0], result[0]
        assert result[1] < AT_ONCE_S


def test_ctrl_c_ends_a_waiting_stage() -> None:
    """The compute thread is the main thread, and waits for a message that never comes."""
    schedules = schedules_of("1f1b", 2, 2)

    def work(rank: int, store: Store) -> object:
        signal.signal(signal.SIGINT, signal.default_int_handler)
        channels = open_channels(store, address_of(rank, 2), options())
        interrupted = False
        if rank == 1:
            timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
            timer.start()
            try:
                run_stage(AddingStage(schedules[1]), schedules[1], channels, context=context_of(1))
            except KeyboardInterrupt:
                interrupted = True
            timer.join()
        barrier(store, "end", 2)
        channels.close()
        return interrupted

    assert values_of(run_forked(2, work, timeout_s=20)) == [False, True]
