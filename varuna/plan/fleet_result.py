"""What replaying a fleet gives: values."""

from __future__ import annotations

import enum
from dataclasses import dataclass, fields

from varuna.plan.fleet_plans import FleetPlan


class Activity(enum.Enum):
    """What a machine's time goes into."""

    TRAINING = "training"
    MORPH = "morph"
    REDONE = "redone"
    RESTORE = "restore"
    WAITING = "waiting"
    UNFINISHED = "unfinished"
    SPARE = "spare"


@dataclass(frozen=True, kw_only=True)
class TimeSpent:
    """Seconds by what they went into; their sum is the whole.

    Attributes:
        training_s: steps that count.
        morph_s: re-planning.
        redone_s: steps, or parts of one, whose work was lost.
        restore_s: reading a checkpoint.
        waiting_s: for enough machines.
        unfinished_s: the step under way at the trace's end.
        spare_s: machines that the plan in force does not use; 0 in seconds of the job.
    """

    training_s: float
    morph_s: float
    redone_s: float
    restore_s: float
    waiting_s: float
    unfinished_s: float
    spare_s: float

    @property
    def total_s(self) -> float:
        """All of it."""
        return float(sum(getattr(self, item.name) for item in fields(self)))


@dataclass(frozen=True, kw_only=True)
class MachineCount:
    """How many machines there are from ``time_s`` on."""

    time_s: float
    num_machines: int


@dataclass(frozen=True, kw_only=True)
class FleetInterval:
    """What the job did for a while.

    Attributes:
        start_s, end_s: seconds since the trace began.
        activity: what.
        num_stages, num_pipelines, micro_batch_size: P (of the deepest pipeline), D and m of the plan in force,
            or being taken up; 0 without one.
        num_machines: that this plan uses.
        samples_per_s: while training; otherwise 0.
    """

    start_s: float
    end_s: float
    activity: Activity
    num_stages: int
    num_pipelines: int
    micro_batch_size: int
    num_machines: int
    samples_per_s: float

    @staticmethod
    def of(activity: Activity, start_s: float, end_s: float, plan: FleetPlan | None) -> FleetInterval:
        """An interval under a plan."""
        return FleetInterval(
            start_s=start_s,
            end_s=end_s,
            activity=activity,
            num_stages=max(len(pipeline.stages) for pipeline in plan.plan.pipelines) if plan else 0,
            num_pipelines=len(plan.plan.pipelines) if plan else 0,
            micro_batch_size=plan.plan.micro_batch_size if plan else 0,
            num_machines=len(plan.used_machines) if plan else 0,
            samples_per_s=plan.samples_per_s if plan and activity is Activity.TRAINING else 0.0,
        )

    def continues_in(self, other: FleetInterval) -> bool:
        """Whether the other is the same, later."""
        return (
            self.end_s == other.start_s
            and self.activity is other.activity
            and (self.num_stages, self.num_pipelines, self.micro_batch_size, self.num_machines)
            == (other.num_stages, other.num_pipelines, other.micro_batch_size, other.num_machines)
            and self.samples_per_s == other.samples_per_s
        )


@dataclass(frozen=True, kw_only=True)
class FleetResult:
    """A replayed trace.

    Attributes:
        trace: its name.
        duration_s: how long it is.
        num_steps, samples: that count.
        ideal_samples: of a job that always ran the plan for the machines present, without morphs, lost steps or
            steps that have to end.
        wall: where the job's time went; its sum is ``duration_s``.
        machines: where the machines' time went; its sum is what is paid for.
        num_morphs, num_restores: generations that began, and how many of them read a checkpoint.
        counts: machines over time.
        intervals: what the job did over time; steps that were lost later are REDONE.
    """

    trace: str
    duration_s: float
    num_steps: int
    samples: int
    ideal_samples: float
    wall: TimeSpent
    machines: TimeSpent
    num_morphs: int
    num_restores: int
    counts: tuple[MachineCount, ...]
    intervals: tuple[FleetInterval, ...]

    @property
    def samples_per_s(self) -> float:
        """Average over the whole trace."""
        return self.samples / self.duration_s

    @property
    def goodput(self) -> float:
        """Samples over those of the ideal."""
        return self.samples / self.ideal_samples

    @property
    def mean_machines(self) -> float:
        """Average over the whole trace."""
        return self.machines.total_s / self.duration_s
