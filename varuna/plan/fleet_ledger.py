"""The books of a fleet's replay: where time went, and what is at risk until the next checkpoint."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from varuna.plan.fleet_plans import FleetPlan
from varuna.plan.fleet_result import Activity, FleetInterval, TimeSpent


@dataclass
class Ledger:
    """Seconds by activity, of the job (``wall_s``) and of machines, and the steps that count.

    ``risk_*`` is the training since ``saved_s``, which is in no checkpoint yet.
    """

    num_steps: int = 0
    samples: int = 0
    wall_s: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    machine_s: dict[Activity, float] = field(default_factory=lambda: dict.fromkeys(Activity, 0.0))
    intervals: list[FleetInterval] = field(default_factory=list)
    saved_s: float = 0.0
    risk_steps: int = 0
    risk_samples: int = 0
    risk_wall_s: float = 0.0
    risk_machine_s: float = 0.0

    def spend(
        self, activity: Activity, start_s: float, end_s: float, num_machines: int, plan: FleetPlan | None
    ) -> None:
        """So many machines did this from then until then."""
        self.wall_s[activity] += end_s - start_s
        self.machine_s[activity] += (end_s - start_s) * num_machines
        if end_s <= start_s:
            return
        interval = FleetInterval.of(activity, start_s, end_s, plan)
        if self.intervals and self.intervals[-1].continues_in(interval):
            interval = FleetInterval.of(activity, self.intervals.pop().start_s, end_s, plan)
        self.intervals.append(interval)

    def train(self, start_s: float, num_steps: int, num_machines: int, plan: FleetPlan) -> None:
        """Steps that were committed."""
        seconds = num_steps * plan.step_s
        self.spend(Activity.TRAINING, start_s, start_s + seconds, num_machines, plan)
        self.num_steps += num_steps
        self.samples += num_steps * plan.plan.batch_size
        self.risk_steps += num_steps
        self.risk_samples += num_steps * plan.plan.batch_size
        self.risk_wall_s += seconds
        self.risk_machine_s += seconds * num_machines

    def save(self, now_s: float) -> None:
        """A checkpoint: nothing is at risk."""
        self.saved_s = now_s
        self.risk_steps = self.risk_samples = 0
        self.risk_wall_s = self.risk_machine_s = 0.0

    def lose(self, now_s: float) -> None:
        """Back to the checkpoint: what was at risk has to be done again."""
        self.num_steps -= self.risk_steps
        self.samples -= self.risk_samples
        for spent, seconds in ((self.wall_s, self.risk_wall_s), (self.machine_s, self.risk_machine_s)):
            spent[Activity.TRAINING] -= seconds
            spent[Activity.REDONE] += seconds
        later = []
        while self.intervals and self.intervals[-1].end_s > self.saved_s:
            later.append(self.intervals.pop())
        for interval in reversed(later):
            self.intervals += _lost_after(interval, self.saved_s)
        self.save(now_s)

    def time_spent(self, spent: dict[Activity, float]) -> TimeSpent:
        """As a value."""
        return TimeSpent(**{f"{activity.value}_s": seconds for activity, seconds in spent.items()})


def _lost_after(interval: FleetInterval, saved_s: float) -> list[FleetInterval]:
    """The interval when what it trained after ``saved_s`` is lost."""
    if interval.activity is not Activity.TRAINING:
        return [interval]
    lost = replace(
        interval, activity=Activity.REDONE, start_s=max(interval.start_s, saved_s), samples_per_s=0.0
    )
    return [replace(interval, end_s=saved_s), lost] if interval.start_s < saved_s else [lost]
