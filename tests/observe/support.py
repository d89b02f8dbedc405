"""Traces, plans and profiles for tests of timelines."""

from __future__ import annotations

from collections.abc import Sequence

from varuna.plan.profile import LinkProfile, Profile, SectionProfile, TaskCosts
from varuna.plan.simulate import TaskSpan
from varuna.plan.spans import COMMIT, REDUCE, UPDATE, Span, StepSpans, WorkerTrace
from varuna.spec import PipelineSpec, Plan, StagePosition, StageSpec, Task, TaskKind


def task_span(name: str, start_s: float, end_s: float) -> TaskSpan:
    return TaskSpan(task=Task(TaskKind(name[0]), int(name[1:])), start_s=start_s, end_s=end_s)


def step(
    tasks: Sequence[tuple[str, float, float]], *, index: int = 0, started_s: float = 0.0, end_s: float
) -> StepSpans:
    """Tasks, then reduce, commit and update in equal parts of the rest until ``end_s``."""
    last_s = max((end for _, _, end in tasks), default=0.0)
    third_s = (end_s - last_s) / 3
    others = tuple(
        Span(name=name, start_s=last_s + third_s * number, end_s=last_s + third_s * (number + 1))
        for number, name in enumerate((REDUCE, COMMIT, UPDATE))
    )
    return StepSpans(
        step_index=index, started_s=started_s, tasks=tuple(task_span(*task) for task in tasks), others=others
    )


def worker(worker_index: int, stage_index: int | None, *steps: StepSpans) -> WorkerTrace:
    position = None if stage_index is None else StagePosition(pipeline_index=0, stage_index=stage_index)
    return WorkerTrace(worker_index=worker_index, position=position, steps=steps)


def two_stages(num_workers: int = 2, num_micro_batches: int = 4, schedule: str = "varuna") -> Plan:
    """Two stages of one section each on workers 0 and 1, micro-batches of 2 samples; the others are spares."""
    stages = (
        StageSpec(worker_index=0, first_section=0, end_section=1, recompute=True),
        StageSpec(worker_index=1, first_section=1, end_section=2),
    )
    pipeline = PipelineSpec(stages=stages, first_micro_batch=0, end_micro_batch=num_micro_batches)
    return Plan(
        pipelines=(pipeline,),
        num_workers=num_workers,
        num_sections=2,
        batch_size=2 * num_micro_batches,
        micro_batch_size=2,
        schedule=schedule,
    )


def two_sections(*, update_s: float = 0.003, step_overhead_s: float = 0.001) -> Profile:
    """Sections that take 10 ms forward, 20 ms backward and keep 1 MB; messages take 1 ms."""
    sections = tuple(
        SectionProfile(
            index=index,
            name=f"part.{index}",
            parameter_bytes=1000,
            gradient_bytes=1000,
            optimizer_bytes=2000,
            update_s=update_s,
            costs=(
                TaskCosts(
                    micro_batch_size=2, forward_s=0.010, recompute_s=0.010, backward_s=0.020,
                    activation_bytes=1_000_000, output_bytes=1000 * (index == 0),
                    gradient_bytes=1000 * (index == 0),
                ),
            ),
        )
        for index in range(2)
    )  # fmt: skip
    link = LinkProfile(latency_s=0.001, bytes_per_s=1e9)
    return Profile(
        model="two parts",
        key="0",
        device="cpu",
        precision="fp32",
        device_memory_bytes=10**9,
        sections=sections,
        within_machine=link,
        across_machines=link,
        step_overhead_s=step_overhead_s,
    )
