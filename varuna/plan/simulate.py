"""Discrete-event simulation of one pipeline's step, over the decision function that the engine runs.

What is assumed: a stage does one task at a time and starts it the moment ``next_task`` names it; a message
leaves when its task ends, costs its sender nothing and arrives ``latency_s`` later, but never before an earlier
one of the same channel. All durations and times are seconds (or any one unit).
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from varuna.plan.schedule import StageSchedule, pipeline_schedules
from varuna.plan.state import StageState, next_task
from varuna.spec import Task, TaskKind

SIMULTANEOUS_S = 1e-9
"""Events this close are taken as simultaneous, so that rounding of sums decides nothing."""

DurationOf = Callable[[int, Task], float]
"""(stage_index, task) -> seconds the task takes there."""

LatencyOf = Callable[[int, Task], float]
"""(stage_index of the sender, task whose result is sent) -> seconds until the neighbour has it."""


@dataclass(frozen=True, kw_only=True)
class StageTimes:
    """Seconds that the tasks of one stage take.

    ``backward_s`` is the whole backward; ``weight_s`` is the part of it that a schedule with split backwards
    puts off, as a task of its own.
    """

    forward_s: float
    backward_s: float
    recompute_s: float = 0.0
    weight_s: float = 0.0

    def of(self, kind: TaskKind, *, split: bool = False) -> float:
        """Seconds of one task of a kind, under a schedule that splits backwards or one that does not."""
        if kind is TaskKind.FORWARD:
            return self.forward_s
        if kind is TaskKind.BACKWARD:
            return self.backward_s - self.weight_s if split else self.backward_s
        return self.recompute_s if kind is TaskKind.RECOMPUTE else self.weight_s


@dataclass(frozen=True, kw_only=True)
class TaskSpan:
    """When a task ran, in seconds from the start of the step."""

    task: Task
    start_s: float
    end_s: float


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """What a simulated step did.

    Attributes:
        makespan_s: from the start to the end of the last task.
        timelines: per stage, its tasks in the order in which they ran.
        peak_in_flight: per stage, the most micro-batches at one time between the start of their forward and the
            end of their backward.
        peak_recomputed: per stage, the same from the start of their recompute.
        peak_held: per stage, the most sets of activations in memory at one time (``StageState.num_held``).
    """

    makespan_s: float
    timelines: tuple[tuple[TaskSpan, ...], ...]
    peak_in_flight: tuple[int, ...]
    peak_recomputed: tuple[int, ...]
    peak_held: tuple[int, ...]


def constant_durations(times: Sequence[StageTimes], *, split: bool = False) -> DurationOf:
    """Every task of a kind takes the same time on a stage; ``split``: the schedule splits backwards."""
    return lambda stage_index, task: times[stage_index].of(task.kind, split=split)


def simulate_step(
    schedules: Sequence[StageSchedule], *, duration_s: DurationOf, latency_s: LatencyOf | float = 0.0
) -> Simulation:
    """Run one step of a pipeline.

    Args:
        schedules: one for each stage, in order.
        duration_s: how long each task takes; asked once when it starts.
        latency_s: how long each message takes, a constant or asked once when it is sent.

    Raises:
        AssertionError: the stages wait for each other; the message shows their states.
    """
    latency_of = latency_s if callable(latency_s) else _constant_latency(latency_s)
    return _Run(schedules, duration_s, latency_of).run()


def ideal_makespan(
    name: str,
    *,
    times: Sequence[StageTimes],
    num_micro_batches: int,
    recompute: Sequence[bool],
    max_in_flight: int = 0,
) -> float:
    """Seconds a schedule takes when every task takes its stated time and messages take none."""
    schedules = pipeline_schedules(
        name,
        num_stages=len(times),
        num_micro_batches=num_micro_batches,
        recompute=recompute,
        max_in_flight=max_in_flight,
    )
    return simulate_step(schedules, duration_s=constant_durations(times, split=schedules[0].split)).makespan_s


def _constant_latency(latency_s: float) -> LatencyOf:
    return lambda _stage_index, _task: latency_s


@dataclass(frozen=True, slots=True)
class _Event:
    """A task ended on a stage (``finished``), or its result arrived there (not ``finished``)."""

    stage_index: int
    task: Task
    finished: bool


class _Run:
    """State of one simulation: the stages, what each runs, and a heap of future events."""

    def __init__(
        self, schedules: Sequence[StageSchedule], duration_of: DurationOf, latency_of: LatencyOf
    ) -> None:
        self.states = [StageState(schedule) for schedule in schedules]
        self.duration_of = duration_of
        self.latency_of = latency_of
        self.events: list[tuple[float, int, _Event]] = []
        self.num_events = 0
        self.running: list[Task | None] = [None] * len(schedules)
        self.timelines: list[list[TaskSpan]] = [[] for _ in schedules]
        self.peak_in_flight = [0] * len(schedules)
        self.peak_recomputed = [0] * len(schedules)
        self.peak_held = [0] * len(schedules)
        self.last_arrival_s: dict[tuple[int, TaskKind], float] = {}

    def run(self) -> Simulation:
        makespan_s = 0.0
        for stage_index in range(len(self.states)):
            self._start(stage_index, 0.0)
        while self.events:
            now_s = self.events[0][0]
            touched = set()
            while self.events and self.events[0][0] <= now_s + SIMULTANEOUS_S:
                time_s, _, event = heapq.heappop(self.events)
                makespan_s = max(makespan_s, time_s)
                touched.add(event.stage_index)
                self._apply(event, time_s)
            for stage_index in sorted(touched):
                if self.running[stage_index] is None:
                    self._start(stage_index, now_s)
        assert all(state.is_done for state in self.states), f"The stages wait for each other: {self.states}"
        return Simulation(
            makespan_s=makespan_s,
            timelines=tuple(tuple(timeline) for timeline in self.timelines),
            peak_in_flight=tuple(self.peak_in_flight),
            peak_recomputed=tuple(self.peak_recomputed),
            peak_held=tuple(self.peak_held),
        )

    def _start(self, stage_index: int, now_s: float) -> None:
        state = self.states[stage_index]
        task = next_task(state)
        if task is None:
            return
        end_s = now_s + self.duration_of(stage_index, task)
        self.running[stage_index] = task
        self.timelines[stage_index].append(TaskSpan(task=task, start_s=now_s, end_s=end_s))
        made_by = TaskKind.RECOMPUTE if state.schedule.recompute else TaskKind.FORWARD
        in_flight = state.num_in_flight + (task.kind is TaskKind.FORWARD)
        recomputed = state.num_recomputed + (task.kind is TaskKind.RECOMPUTE)
        self.peak_in_flight[stage_index] = max(self.peak_in_flight[stage_index], in_flight)
        self.peak_recomputed[stage_index] = max(self.peak_recomputed[stage_index], recomputed)
        held = state.num_held + (task.kind is made_by)
        self.peak_held[stage_index] = max(self.peak_held[stage_index], held)
        self._schedule(end_s, _Event(stage_index, task, finished=True))

    def _apply(self, event: _Event, now_s: float) -> None:
        state = self.states[event.stage_index]
        if event.finished:
            state.finish(event.task)
            self.running[event.stage_index] = None
            self._send(event.stage_index, event.task, now_s)
        elif event.task.kind is TaskKind.FORWARD:
            state.activations_arrived += 1
        else:
            state.gradients_arrived += 1

    def _send(self, stage_index: int, task: Task, now_s: float) -> None:
        """Put the arrival of a finished task's result at its neighbour, if it has one, on the heap."""
        if task.kind in (TaskKind.RECOMPUTE, TaskKind.WEIGHT):
            return
        receiver = stage_index + (1 if task.kind is TaskKind.FORWARD else -1)
        if not 0 <= receiver < len(self.states):
            return
        channel = (stage_index, task.kind)
        arrival_s = max(now_s + self.latency_of(stage_index, task), self.last_arrival_s.get(channel, 0.0))
        self.last_arrival_s[channel] = arrival_s
        self._schedule(arrival_s, _Event(receiver, task, finished=False))

    def _schedule(self, time_s: float, event: _Event) -> None:
        heapq.heappush(self.events, (time_s, self.num_events, event))
        self.num_events += 1
