"""Small made-up profiles and plans for tests of predictions."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from varuna.plan.profile import LinkProfile, Profile, SectionProfile, TaskCosts
from varuna.spec import PipelineSpec, Plan, StageSpec

FREE = LinkProfile(latency_s=0.0, bytes_per_s=1e18)


def make_costs(size: int, **changes: Any) -> TaskCosts:
    """Forward 1 s a sample, recompute 1, backward 2 of which 1 for weights; activations 100 bytes a sample."""
    values: dict[str, Any] = {
        "forward_s": 1.0 * size,
        "recompute_s": 1.0 * size,
        "backward_s": 2.0 * size,
        "weight_s": 1.0 * size,
        "activation_bytes": 100 * size,
        "weight_bytes": 40 * size,
        "output_bytes": 10 * size,
        "gradient_bytes": 10 * size,
    }
    return TaskCosts(micro_batch_size=size, **(values | changes))


def make_section(index: int, costs: Sequence[TaskCosts] | None = None, **changes: Any) -> SectionProfile:
    """Parameters of 1000 bytes."""
    values: dict[str, Any] = {
        "parameter_bytes": 1000,
        "gradient_bytes": 1000,
        "optimizer_bytes": 2000,
        "update_s": 0.0,
    }
    return SectionProfile(
        index=index, name=f"block.{index}", costs=tuple(costs or [make_costs(1)]), **(values | changes)
    )


def make_profile(num_sections: int = 4, **changes: Any) -> Profile:
    """Equal sections; the last one sends nothing; links are free."""
    sections = [make_section(index) for index in range(num_sections - 1)]
    sections.append(make_section(num_sections - 1, [make_costs(1, output_bytes=0, gradient_bytes=0)]))
    values: dict[str, Any] = {
        "model": "made up",
        "key": "",
        "device": "cpu",
        "precision": "fp32",
        "device_memory_bytes": 10**9,
        "sections": tuple(sections),
        "within_machine": FREE,
        "across_machines": FREE,
    }
    return Profile(**(values | changes))


def make_plan(
    borders: Sequence[Sequence[int]],
    shares: Sequence[int],
    *,
    schedule: str = "1f1b",
    recompute: bool = False,
    micro_batch_size: int = 1,
    batch_size: int | None = None,
) -> Plan:
    """A pipeline for each of ``borders`` (0 to the number of sections), with its share of micro-batches."""
    pipelines: list[PipelineSpec] = []
    worker = first = 0
    for ends, share in zip(borders, shares, strict=True):
        stages = []
        for start, end in pairwise(ends):
            stages.append(
                StageSpec(worker_index=worker, first_section=start, end_section=end, recompute=recompute)
            )
            worker += 1
        pipelines.append(
            PipelineSpec(stages=tuple(stages), first_micro_batch=first, end_micro_batch=first + share)
        )
        first += share
    return Plan(
        pipelines=tuple(pipelines),
        num_workers=worker,
        num_sections=borders[0][-1],
        batch_size=batch_size or first * micro_batch_size,
        micro_batch_size=micro_batch_size,
        schedule=schedule,
    )
