"""Real steps make the profile better: what tasks took in training replaces what was measured before.

Every worker notes how long its tasks take (``StageRefiner``) and now and then tells worker 0 through the store,
waiting for nobody; worker 0 writes the cached profile anew. Costs of all micro-batch sizes move together: how
they grow with the size stays as it was measured, for training shows one size only.

Medians throughout, over the micro-batches of a step and then over steps, so that a pause counts for nothing. On
CUDA devices tasks end on the host before the device has done them; nothing is refined there.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import msgspec
from torch.distributed import DistError

from varuna.errors import ConfigError
from varuna.plan.costs import backward_task_s, stage_costs
from varuna.plan.profile import Profile, SectionProfile, TaskCosts
from varuna.plan.profile_file import write_profile
from varuna.plan.spans import COMMIT, UPDATE, StepSpans
from varuna.run.world import World
from varuna.spec import Plan, StageSpec, TaskKind

_FIRST_TOLD = 4
"""Steps until the first correction; then at four times as many, and from ``_TOLD_EVERY`` on so often."""

_TOLD_EVERY = 256
_NUM_KEPT = 64
_LARGEST_FACTOR = 5.0
"""A stage that seems more than so many times slower or faster than measured is taken to be disturbed."""


@dataclass(frozen=True, kw_only=True)
class StageObservation:
    """What one worker saw in training.

    Attributes:
        first_section, end_section, micro_batch_size: what it ran.
        num_steps: steps seen.
        task_s: median seconds per kind of task (``TaskKind.value``).
        update_s, commit_s: median seconds of update and commit; 0 if not seen.
    """

    first_section: int
    end_section: int
    micro_batch_size: int
    num_steps: int
    task_s: dict[str, float] = field(default_factory=dict)
    update_s: float = 0.0
    commit_s: float = 0.0


class StageRefiner:
    """Notes what this worker's tasks take; a ``SpanListener``.

    Args:
        world: this worker.
        plan: the layout.
        profile: what the plan was made from.
        path: on worker 0, where the corrected profile goes; None keeps it to itself.
        is_current: False once another plan is at work: nothing is noted then.
    """

    def __init__(
        self, world: World, plan: Plan, profile: Profile, path: Path | None, is_current: Callable[[], bool]
    ) -> None:
        self._world = world
        self._plan = plan
        self._profile = profile
        self._path = path
        self._is_current = is_current
        self._stage = plan.stage_of(world.rank)
        self._short = self._index_of_short(plan)
        self._num_seen = 0
        self._next_told = _FIRST_TOLD
        self._kept: dict[str, deque[float]] = {}

    def wants(self, step_index: int) -> bool:
        """Every step of this plan on a CPU."""
        return self._world.device.type == "cpu" and self._is_current()

    def record(self, step_index: int, spans: StepSpans) -> None:
        """Note one step; the first is slow for reasons of its own."""
        self._num_seen += 1
        if self._num_seen > 1 and self._stage is not None:
            self._note(spans)
        if self._num_seen == self._next_told:
            self._next_told = min(4 * self._next_told, self._next_told + _TOLD_EVERY)
            with contextlib.suppress(DistError):  # the store is gone, and soon this plan
                self._tell()

    def _note(self, spans: StepSpans) -> None:
        seconds: dict[str, list[float]] = {}
        for span in spans.tasks:
            if span.task.micro_batch_index != self._short:
                seconds.setdefault(span.task.kind.value, []).append(span.end_s - span.start_s)
        for other in spans.others:
            seconds.setdefault(other.name, []).append(other.end_s - other.start_s)
        for name, found in seconds.items():
            self._kept.setdefault(name, deque(maxlen=_NUM_KEPT)).append(statistics.median(found))

    def _tell(self) -> None:
        mine = self._observation(self._stage)
        key = f"refine/{self._world.rank}"
        if self._world.rank != 0:
            if mine is not None:
                self._world.store.set(key, msgspec.json.encode(mine).decode())
            return
        if self._path is not None:
            told = [found for found in (mine, *self._told_by_others()) if found is not None]
            with contextlib.suppress(ConfigError):  # a full disk, say: training goes on
                write_profile(refined(self._profile, told), self._path)

    def _told_by_others(self) -> list[StageObservation]:
        store = self._world.store
        keys = [f"refine/{rank}" for rank in range(1, self._world.size)]
        present = [key for key in keys if store.check([key])]
        return [msgspec.json.decode(bytes(store.get(key)), type=StageObservation) for key in present]

    def _observation(self, stage: StageSpec | None) -> StageObservation | None:
        if stage is None or not self._kept:
            return None
        medians = {name: statistics.median(found) for name, found in self._kept.items()}
        return StageObservation(
            first_section=stage.first_section,
            end_section=stage.end_section,
            micro_batch_size=self._plan.micro_batch_size,
            num_steps=self._num_seen - 1,
            task_s={kind.value: medians[kind.value] for kind in TaskKind if kind.value in medians},
            update_s=medians.get(UPDATE, 0.0),
            commit_s=medians.get(COMMIT, 0.0),
        )

    def _index_of_short(self, plan: Plan) -> int | None:
        """Index in this pipeline of the micro-batch with fewer samples, if it has that one."""
        position = plan.position_of(self._world.rank)
        if position is None or plan.batch_size % plan.micro_batch_size == 0:
            return None
        pipeline = plan.pipelines[position.pipeline_index]
        if pipeline.end_micro_batch != plan.num_micro_batches:
            return None
        return pipeline.num_micro_batches - 1


# --- pure -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class _Factors:
    """By what a section's costs are multiplied."""

    forward: float
    recompute: float
    backward: float
    weight: float
    update: float


def refined(profile: Profile, observations: Sequence[StageObservation]) -> Profile:
    """The profile with the level of observed stages; sections that nobody ran keep their numbers.

    A stage's observed seconds are shared among its sections as the profile has it. Of several workers with one
    section the middle one counts.
    """
    factors: dict[int, list[_Factors]] = {}
    for seen in observations:
        if seen.task_s and seen.end_section <= len(profile.sections):
            found = _factors(profile, seen)
            for index in range(seen.first_section, seen.end_section):
                factors.setdefault(index, []).append(found)
    if not factors:
        return profile
    sections = tuple(
        _scaled(section, factors[section.index]) if section.index in factors else section
        for section in profile.sections
    )
    commits = [seen.commit_s for seen in observations if seen.commit_s > 0]
    return replace(
        profile,
        sections=sections,
        # whoever comes last to the commit waits for nobody
        step_overhead_s=min(commits, default=profile.step_overhead_s),
        num_refinements=profile.num_refinements + max(seen.num_steps for seen in observations),
    )


def _factors(profile: Profile, seen: StageObservation) -> _Factors:
    costs = stage_costs(profile, seen.first_section, seen.end_section, seen.micro_batch_size)
    is_split = TaskKind.WEIGHT.value in seen.task_s
    forward = _factor(profile, seen.task_s, TaskKind.FORWARD, costs.forward_s, 1.0)
    backward = _factor(profile, seen.task_s, TaskKind.BACKWARD, backward_task_s(costs, split=is_split), forward)
    update_s = sum(section.update_s for section in profile.sections[seen.first_section : seen.end_section])
    return _Factors(
        forward=forward,
        recompute=_factor(profile, seen.task_s, TaskKind.RECOMPUTE, costs.recompute_s, forward),
        backward=backward,
        weight=_factor(profile, seen.task_s, TaskKind.WEIGHT, costs.weight_s, backward),
        update=_clipped(seen.update_s / update_s) if seen.update_s > 0 and update_s > 0 else 1.0,
    )


def _factor(
    profile: Profile, task_s: Mapping[str, float], kind: TaskKind, expected_s: float, default: float
) -> float:
    """Seen over expected, both without the engine's own time."""
    if kind.value not in task_s or expected_s <= 0:
        return default
    return _clipped((task_s[kind.value] - profile.task_overhead_s) / expected_s)


def _clipped(factor: float) -> float:
    return min(_LARGEST_FACTOR, max(1 / _LARGEST_FACTOR, factor))


def _scaled(section: SectionProfile, factors: Sequence[_Factors]) -> SectionProfile:
    middle = _Factors(
        forward=_middle(found.forward for found in factors),
        recompute=_middle(found.recompute for found in factors),
        backward=_middle(found.backward for found in factors),
        weight=_middle(found.weight for found in factors),
        update=_middle(found.update for found in factors),
    )
    return replace(
        section,
        update_s=section.update_s * middle.update,
        costs=tuple(_scaled_costs(costs, middle) for costs in section.costs),
    )


def _scaled_costs(costs: TaskCosts, factors: _Factors) -> TaskCosts:
    weight_s = costs.weight_s * factors.weight
    return replace(
        costs,
        forward_s=costs.forward_s * factors.forward,
        recompute_s=costs.recompute_s * factors.recompute,
        backward_s=(costs.backward_s - costs.weight_s) * factors.backward + weight_s,
        weight_s=weight_s,
        split_s=costs.split_s * factors.backward,
    )


def _middle(values: Iterable[float]) -> float:
    return statistics.median(values)
