"""What several tests of ``varuna.plan`` share."""

from __future__ import annotations

import random
from collections.abc import Sequence

from varuna.plan import StageSchedule, StageState, Task, TaskKind, next_task
from varuna.spec import SectionSpec


def make_sections(flops: Sequence[float], *, parameter_bytes: int = 100) -> list[SectionSpec]:
    return [
        SectionSpec(
            index=index,
            name=f"block.{index}",
            parameter_names=(f"block.{index}.weight",),
            parameter_bytes=parameter_bytes,
            forward_flops=value,
            output_bytes=8,
        )
        for index, value in enumerate(flops)
    ]


def check_bounds(state: StageState) -> None:
    """What must hold on a stage at every moment."""
    schedule = state.schedule
    assert 0 <= state.num_in_flight <= schedule.max_in_flight, state
    assert state.num_recomputed <= (1 if schedule.recompute else 0), state
    assert state.forwards_done <= state.activations_arrived, state
    assert state.backwards_done <= state.forwards_done, state
    if not schedule.is_last:
        assert state.backwards_done <= state.gradients_arrived, state
    if schedule.recompute:
        assert state.backwards_done <= state.recomputes_done <= state.forwards_done, state
    assert state.weights_done <= (state.backwards_done if schedule.split else 0), state
    if schedule.split:
        assert 0 <= state.num_held <= schedule.max_held, state


def check_order(tasks: Sequence[Task], schedule: StageSchedule) -> None:
    """Each task once, each kind ascending, and per micro-batch F, then R, then B, then W."""
    place = {task: index for index, task in enumerate(tasks)}
    kinds = [TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.WEIGHT]
    if not schedule.recompute:
        kinds.remove(TaskKind.RECOMPUTE)
    if not schedule.split:
        kinds.remove(TaskKind.WEIGHT)
    assert len(tasks) == schedule.num_tasks
    assert len(place) == len(tasks) == len(kinds) * schedule.num_micro_batches
    for kind in kinds:
        indices = [task.micro_batch_index for task in tasks if task.kind is kind]
        assert indices == list(range(schedule.num_micro_batches))
    for index in range(schedule.num_micro_batches):
        places = [place[Task(kind, index)] for kind in kinds]
        assert places == sorted(places)


class _Pipeline:
    """A pipeline whose tasks end and whose messages arrive in whatever order ``step`` is told."""

    def __init__(self, schedules: Sequence[StageSchedule]) -> None:
        self.states = [StageState(schedule) for schedule in schedules]
        self.running: list[Task | None] = [None] * len(schedules)
        self.activations_sent = [0] * len(schedules)  # on their way to stage i
        self.gradients_sent = [0] * len(schedules)  # on their way to stage i
        self.done: list[list[Task]] = [[] for _ in schedules]

    def start(self) -> None:
        for index, state in enumerate(self.states):
            if self.running[index] is None:
                self.running[index] = next_task(state)

    def possible(self) -> list[tuple[str, int]]:
        events = [("end", index) for index, task in enumerate(self.running) if task is not None]
        events += [("activation", index) for index, count in enumerate(self.activations_sent) if count]
        events += [("gradient", index) for index, count in enumerate(self.gradients_sent) if count]
        return events

    def step(self, event: str, index: int) -> None:
        if event == "end":
            self._end(index)
        elif event == "activation":
            self.activations_sent[index] -= 1
            self.states[index].activations_arrived += 1
        else:
            self.gradients_sent[index] -= 1
            self.states[index].gradients_arrived += 1

    def _end(self, index: int) -> None:
        task = self.running[index]
        assert task is not None
        self.running[index] = None
        self.states[index].finish(task)
        check_bounds(self.states[index])
        self.done[index].append(task)
        if task.kind is TaskKind.FORWARD and index + 1 < len(self.states):
            self.activations_sent[index + 1] += 1
        elif task.kind is TaskKind.BACKWARD and index > 0:
            self.gradients_sent[index - 1] += 1


def drain(schedules: Sequence[StageSchedule], rng: random.Random) -> list[list[Task]]:
    """Run a pipeline under an adversary that has no clock: any task may end next, any message may arrive next.

    Returns the tasks each stage ran; fails if the stages come to wait for each other or a bound is broken.
    """
    pipeline = _Pipeline(schedules)
    # an adversary with favourites delays some kinds of event for as long as it can
    weights = {event: rng.choice([1e-6, 1.0, 1e6]) for event in ("end", "activation", "gradient")}
    while not all(state.is_done for state in pipeline.states):
        pipeline.start()
        events = pipeline.possible()
        assert events, f"the stages wait for each other: {pipeline.states}"
        pipeline.step(*rng.choices(events, [weights[event] for event, _ in events])[0])
    assert not any(pipeline.running)
    assert not any(next_task(state) for state in pipeline.states)
    return pipeline.done
