"""What training shows corrects a profile: the level of stages, not how costs grow; pauses count for nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed import HashStore  # type: ignore[attr-defined]

from tests.plan.test_profile_file import PROFILE
from varuna.plan.costs import stage_costs
from varuna.plan.profile import Profile, TaskCosts
from varuna.plan.profile_file import read_profile
from varuna.plan.simulate import TaskSpan
from varuna.plan.spans import COMMIT, UPDATE, Span, StepSpans
from varuna.run.refine import StageObservation, StageRefiner, refined
from varuna.run.world import World
from varuna.spec import PipelineSpec, Plan, StageSpec, Task, TaskKind


def costs(size: int, weight_s: float = 0.0) -> TaskCosts:
    return TaskCosts(
        micro_batch_size=size,
        forward_s=0.1 * size,
        recompute_s=0.1 * size,
        backward_s=0.2 * size,
        weight_s=weight_s * size,
        activation_bytes=100 * size,
    )


def profile_of(weight_s: float = 0.0) -> Profile:
    sections = tuple(
        replace(section, costs=(costs(1, weight_s), costs(2, weight_s))) for section in PROFILE.sections
    )
    return replace(PROFILE, sections=sections)


def observed(first: int = 0, end: int = 2, **tasks_s: float) -> StageObservation:
    return StageObservation(
        first_section=first, end_section=end, micro_batch_size=2, num_steps=10, task_s=tasks_s
    )


def test_a_stage_takes_what_it_was_seen_to_take() -> None:
    found = refined(profile_of(), [observed(F=0.6, B=0.6, R=0.5)])
    stage = stage_costs(found, 0, 2, 2)
    assert stage.forward_s == pytest.approx(0.6)  # 0.4 before
    assert stage.backward_s == pytest.approx(0.6)  # 0.8 before
    assert stage.recompute_s == pytest.approx(0.5)
    assert stage_costs(found, 0, 2, 1).forward_s == pytest.approx(0.3)  # as it grew before
    assert stage.activation_bytes == stage_costs(profile_of(), 0, 2, 2).activation_bytes
    assert found.num_refinements == 10


def test_only_sections_that_ran_change() -> None:
    found = refined(profile_of(), [observed(0, 1, F=0.4, B=0.4)])
    assert found.sections[1] == profile_of().sections[1]
    assert stage_costs(found, 0, 1, 2).forward_s == pytest.approx(0.4)
    assert refined(profile_of(), []) == profile_of()


def test_the_engines_own_time_is_not_counted_twice() -> None:
    found = refined(replace(profile_of(), task_overhead_s=0.1), [observed(F=0.5, B=0.9)])
    assert stage_costs(found, 0, 2, 2).forward_s == pytest.approx(0.4)
    assert stage_costs(found, 0, 2, 2).backward_s == pytest.approx(0.8)


def test_both_parts_of_a_split_backward() -> None:
    found = refined(profile_of(weight_s=0.05), [observed(F=0.4, B=1.2, W=0.4)])  # B 0.6, W 0.2 before
    stage = stage_costs(found, 0, 2, 2)
    assert stage.weight_s == pytest.approx(0.4)
    assert stage.backward_s == pytest.approx(1.6)


def test_one_disturbed_worker_among_three_counts_for_nothing() -> None:
    seen = [observed(F=0.4, B=0.8), observed(F=0.4, B=0.8), observed(F=40.0, B=80.0)]
    assert stage_costs(refined(profile_of(), seen), 0, 2, 2).forward_s == pytest.approx(0.4)


def test_a_single_absurd_observation_moves_a_stage_by_a_bounded_factor() -> None:
    found = refined(profile_of(), [observed(F=400.0, B=0.0001)])
    assert stage_costs(found, 0, 2, 2).forward_s == pytest.approx(5 * 0.4)
    assert stage_costs(found, 0, 2, 2).backward_s == pytest.approx(0.8 / 5)


def test_update_and_commit() -> None:
    seen = [
        replace(observed(0, 1, F=0.2), update_s=0.5, commit_s=0.3),
        replace(observed(1, 2, F=0.2), update_s=0.25, commit_s=0.02),
    ]
    found = refined(profile_of(), seen)
    assert [section.update_s for section in found.sections] == pytest.approx([0.5, 0.25])
    assert found.step_overhead_s == 0.02  # whoever came last waited for nobody


# --- noting steps ---------------------------------------------------------------------------

PLAN = Plan(
    pipelines=tuple(
        PipelineSpec(
            stages=(StageSpec(worker_index=index, first_section=0, end_section=2),),
            first_micro_batch=3 * index,
            end_micro_batch=3 * index + 3,
        )
        for index in range(2)
    ),
    num_workers=2,
    num_sections=2,
    batch_size=11,  # the last micro-batch has one sample
    micro_batch_size=2,
    schedule="varuna",
)


def spans(step_index: int, forward_s: list[float]) -> StepSpans:
    tasks = tuple(
        TaskSpan(task=Task(kind, k), start_s=1.0, end_s=1.0 + seconds * factor)
        for kind, factor in ((TaskKind.FORWARD, 1), (TaskKind.BACKWARD, 2))
        for k, seconds in enumerate(forward_s)
    )
    others = (Span(name=COMMIT, start_s=2.0, end_s=2.25), Span(name=UPDATE, start_s=3.0, end_s=3.5))
    return StepSpans(step_index=step_index, started_s=0.0, tasks=tasks, others=others)


def refiner(rank: int, store: HashStore, path: Path | None, is_current: bool = True) -> StageRefiner:
    world = World(rank=rank, size=2, store=store)
    return StageRefiner(world, PLAN, profile_of(), path, lambda: is_current)


def test_steps_are_noted_told_and_written(tmp_path: Path) -> None:
    path, store = tmp_path / "p.json", HashStore()
    other, first = refiner(1, store, None), refiner(0, store, path)
    for step in range(4):
        seconds = (9.0, 0.6, 0.8, 1.0)[step]  # the first step is slow
        other.record(step, spans(step, [seconds - 0.1, seconds + 0.1, 0.1]))  # the last micro-batch is short
        assert not path.exists()
    for step in range(4):
        first.record(step, spans(step, [0.4, 5.0, 0.4]))  # something paused in the middle
    found = read_profile(path)
    assert stage_costs(found, 0, 2, 2).forward_s == pytest.approx(0.6)  # between 0.4 and 0.8
    assert stage_costs(found, 0, 2, 2).backward_s == pytest.approx(1.2)
    assert sum(section.update_s for section in found.sections) == pytest.approx(0.5)
    assert found.step_overhead_s == pytest.approx(0.25)
    assert found.num_refinements == 3


def test_a_profile_that_cannot_be_written_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    first = refiner(0, HashStore(), tmp_path / "file" / "p.json")
    for step in range(5):
        first.record(step, spans(step, [0.8, 0.8, 0.8]))


def test_a_second_correction_starts_from_what_was_measured(tmp_path: Path) -> None:
    path = tmp_path / "p.json"
    first = refiner(0, HashStore(), path)
    for step in range(17):
        first.record(step, spans(step, [0.8, 0.8, 0.8]))
    assert stage_costs(read_profile(path), 0, 2, 2).forward_s == pytest.approx(0.8)  # not 1.6
    assert read_profile(path).num_refinements == 15


def test_nothing_is_wanted_of_another_plan_or_a_gpu() -> None:
    assert refiner(0, HashStore(), None).wants(0)
    assert not refiner(0, HashStore(), None, is_current=False).wants(0)
    world = World(rank=0, size=2, store=HashStore(), device=torch.device("cuda"))
    assert not StageRefiner(world, PLAN, profile_of(), None, lambda: True).wants(0)
