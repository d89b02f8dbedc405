"""Plans of made-up speed for tests of fleets."""

from __future__ import annotations

from collections.abc import Mapping

from varuna.plan.fleet_plans import FleetPlan
from varuna.spec import PipelineSpec, Plan, StageSpec


def fleet_plan(
    num_machines: int, num_stages: int, step_s: float, *, batch_size: int = 100, devices_per_machine: int = 1
) -> FleetPlan:
    """As many pipelines of ``num_stages`` stages as fit; stage i holds section i."""
    num_workers = num_machines * devices_per_machine
    num_pipelines = num_workers // num_stages
    borders = [index * batch_size // num_pipelines for index in range(num_pipelines + 1)]
    plan = Plan(
        pipelines=tuple(
            PipelineSpec(
                stages=tuple(
                    StageSpec(
                        worker_index=pipeline * num_stages + stage, first_section=stage, end_section=stage + 1
                    )
                    for stage in range(num_stages)
                ),
                first_micro_batch=borders[pipeline],
                end_micro_batch=borders[pipeline + 1],
            )
            for pipeline in range(num_pipelines)
        ),
        num_workers=num_workers,
        num_sections=num_stages,
        batch_size=batch_size,
        micro_batch_size=1,
        schedule="varuna",
    )
    return FleetPlan(plan=plan, devices_per_machine=devices_per_machine, step_s=step_s)


class TablePlanner:
    """Seconds of a step by number of machines; no plan for numbers that are not listed."""

    def __init__(self, step_s: Mapping[int, float], *, num_stages: int = 1) -> None:
        self.plans = {count: fleet_plan(count, num_stages, seconds) for count, seconds in step_s.items()}

    def __call__(self, num_machines: int) -> FleetPlan | None:
        return self.plans.get(num_machines)
