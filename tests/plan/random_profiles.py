"""Random profiles for tests of choosing."""

from __future__ import annotations

import random
from typing import Any

from varuna.plan.profile import LinkProfile, Profile, SectionProfile, TaskCosts, Tie

SIZES = (1, 2, 4)


def random_profile(rng: random.Random, num_sections: int, **changes: Any) -> Profile:
    """Sections unlike each other, costs that grow with m, links that cost, at times a tied parameter."""
    sections = tuple(_section(rng, index, index == num_sections - 1) for index in range(num_sections))
    ties: tuple[Tie, ...] = ()
    if num_sections > 1 and rng.random() < 0.3:
        least = min(sections[0].parameter_bytes, sections[-1].parameter_bytes)
        ties = (Tie(name="tied", num_bytes=least // 2, section_indices=(0, num_sections - 1)),)
    values: dict[str, Any] = {
        "model": "random",
        "key": "",
        "device": "cpu",
        "precision": "fp32",
        "device_memory_bytes": 10**12,
        "runtime_bytes": rng.choice([0, 500]),
        "sections": sections,
        "ties": ties,
        "within_machine": LinkProfile(latency_s=0.0, bytes_per_s=10**6),
        "across_machines": LinkProfile(
            latency_s=rng.choice([0.0, 0.3]),
            bytes_per_s=rng.choice([100.0, 10**4]),
            shared_bytes_per_s=rng.choice([0.0, 200.0]),
            send_s=rng.choice([0.0, 0.05]),
        ),
        "reduces_beside": num_sections % 3 > 0,
        "task_overhead_s": rng.choice([0.0, 0.1]),
        "step_overhead_s": rng.choice([0.0, 0.5]),
    }
    return Profile(**(values | changes))


def _section(rng: random.Random, index: int, is_last: bool) -> SectionProfile:
    fixed_s, sample_s = rng.uniform(0.0, 0.5), rng.uniform(0.2, 2.0)
    share = rng.choice([0.0, 0.3, 0.5])
    activation, output = rng.randint(0, 400), 0 if is_last else rng.randint(1, 60)
    parameters = rng.randint(0, 2000)
    costs = tuple(
        TaskCosts(
            micro_batch_size=size,
            forward_s=fixed_s + sample_s * size,
            recompute_s=fixed_s + sample_s * size,
            backward_s=2 * (fixed_s + sample_s * size),
            weight_s=2 * share * (fixed_s + sample_s * size),
            split_s=0.2 * sample_s * size * (index % 2),
            activation_bytes=activation * size,
            weight_bytes=rng.randint(0, 300) * size,
            workspace_bytes=rng.randint(0, 50),
            output_bytes=output * size,
            gradient_bytes=output * size,
        )
        for size in SIZES
    )
    return SectionProfile(
        index=index,
        name=f"block.{index}",
        parameter_bytes=parameters,
        gradient_bytes=parameters,
        optimizer_bytes=2 * parameters,
        update_s=rng.choice([0.0, 0.05]),
        costs=costs,
    )
