"""The plan for so many machines: chosen once per number, remembered."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property

from varuna.errors import PlanError
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster, Machine
from varuna.plan.profile import Profile
from varuna.spec import Plan


@dataclass(frozen=True, kw_only=True)
class FleetPlan:
    """A plan for a number of machines, like one another.

    Attributes:
        plan: worker i is on machine ``i // devices_per_machine``.
        devices_per_machine: workers of each machine.
        step_s: predicted seconds of a step.
    """

    plan: Plan
    devices_per_machine: int
    step_s: float

    @property
    def samples_per_s(self) -> float:
        """Global batch over step time."""
        return self.plan.batch_size / self.step_s

    @property
    def num_machines(self) -> int:
        """Machines that the plan is for, spare ones included."""
        return self.plan.num_workers // self.devices_per_machine

    @cached_property
    def used_machines(self) -> frozenset[int]:
        """Machines with at least one worker in a pipeline."""
        return frozenset().union(*self.holders)

    @cached_property
    def holders(self) -> tuple[frozenset[int], ...]:
        """Per section, the machines that hold it."""
        return tuple(
            frozenset(worker // self.devices_per_machine for worker in self.plan.holders_of(section_index))
            for section_index in range(self.plan.num_sections)
        )


Planner = Callable[[int], FleetPlan | None]
"""Number of machines -> their plan, or None where the model cannot be trained on so few."""


class FleetPlanner:
    """A ``Planner`` that chooses with ``choose_plan``; the same number always gets the same plan.

    Args:
        profile: of the model.
        batch_size: global batch.
        devices_per_machine: workers of each machine.
    """

    def __init__(self, profile: Profile, batch_size: int, devices_per_machine: int = 1) -> None:
        self.profile = profile
        self.batch_size = batch_size
        self.devices_per_machine = devices_per_machine
        self.refusals: dict[int, str] = {}
        """Per number of machines without a plan, why."""
        self._known: dict[int, FleetPlan | None] = {0: None}

    def __call__(self, num_machines: int) -> FleetPlan | None:
        """The plan for so many machines."""
        if num_machines not in self._known:
            self._known[num_machines] = self._choose(num_machines)
        return self._known[num_machines]

    def _choose(self, num_machines: int) -> FleetPlan | None:
        machines = tuple(
            Machine(name=f"machine-{index}", num_workers=self.devices_per_machine)
            for index in range(num_machines)
        )
        try:
            choice = choose_plan(self.profile, Cluster(machines=machines), batch_size=self.batch_size)
        except PlanError as error:
            self.refusals[num_machines] = str(error)
            return None
        return FleetPlan(
            plan=choice.plan,
            devices_per_machine=self.devices_per_machine,
            step_s=choice.prediction.step_s,
        )
