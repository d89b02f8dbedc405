"""What a job would have done on a fleet whose machines come and go: a trace replayed against plans.

What is assumed:

- Every membership has the plan that would be chosen for so many machines; its steps take what was predicted.
- A machine that joins gets ready for ``start_s``, while the others train, and waits until the step under way
  has ended; then the job re-plans, if that makes it faster, which takes ``morph_s`` in which nobody trains. A
  machine that a plan does not use is a spare: it is paid for.
- A preemption with notice: the job re-plans when the step under way has ended, if that is before the machine
  goes; otherwise the step is lost. Either way the machine hands over what it holds in time.
- A preemption without notice loses the step under way. If every machine that holds some section goes, all
  steps since the last checkpoint are lost too, and reading it takes ``restore_s``; else survivors have it all.
- Checkpoints are written while training goes on, after the first step that ends ``checkpoint_interval_s`` or
  more after the last one.
- A spare's leaving disturbs nothing. A change during a re-plan starts it again if it takes a machine in use.
- A job without enough machines waits; those that are left keep what they hold.

The replay goes from event to event and checkpoint to checkpoint in closed form; the same trace, plans and
options give the same numbers. Time is in seconds since the trace began.
"""

from __future__ import annotations

import math
import random
from dataclasses import dataclass

from varuna.errors import ConfigError, PlanError
from varuna.plan.fleet_ledger import Ledger
from varuna.plan.fleet_plans import FleetPlan, Planner
from varuna.plan.fleet_result import Activity, FleetResult, MachineCount
from varuna.plan.fleet_trace import FleetChange, FleetTrace

_EPSILON_S = 1e-9


@dataclass(frozen=True, kw_only=True)
class FleetOptions:
    """What a trace does not say.

    Attributes:
        morph_s: seconds without training per re-plan, first start included. The default is a guess that is on
            the safe side: what was measured is in ``docs/what-if.md``.
        start_s: seconds from a machine's coming until it can be used: process, libraries, capture. Those that
            are there when the trace begins are ready.
        notice_s: seconds from a preemption's notice to the machine's end: 120 on AWS, 30 on GCP and Azure.
        sudden_share: share of preemptions that come without notice, from 0 to 1. The default is a guess.
        checkpoint_interval_s: at least so long from one checkpoint to the next.
        restore_s: seconds to read a checkpoint on top of a re-plan.
        seed: of the draw which preemptions are sudden.
    """

    morph_s: float = 30.0
    start_s: float = 0.0
    notice_s: float = 30.0
    sudden_share: float = 0.1
    checkpoint_interval_s: float = 600.0
    restore_s: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("morph_s", "start_s", "notice_s", "checkpoint_interval_s", "restore_s"):
            value = getattr(self, name)
            if not 0 <= value < math.inf:
                raise ConfigError(f"{name}={value} must be at least 0 and finite.")
        if not 0 <= self.sudden_share <= 1:
            raise ConfigError(f"sudden_share={self.sudden_share} must be from 0 to 1.")


def replay_fleet(trace: FleetTrace, planner: Planner, options: FleetOptions) -> FleetResult:
    """Replay a trace.

    Args:
        trace: who was there when.
        planner: the plan for each number of machines.
        options: what the trace does not say.

    Raises:
        PlanError: no moment of the trace has enough machines.
    """
    replay = _Replay(planner, options)
    events = [*fleet_events(trace, options), *_starts(trace, options)]
    for time_s, event in sorted(events, key=lambda event: event[0]):
        if time_s >= trace.end_s:
            break
        replay.advance(time_s)
        match event:
            case None:
                replay.ready()
            case str():
                replay.notice(event)
            case FleetChange():
                replay.change(event)
    replay.advance(trace.end_s)
    replay.finish()
    counts, ideal_samples = _machines_over_time(trace, planner)
    if not ideal_samples:
        raise PlanError(
            f"{trace.name} never has enough machines for this model: at most "
            f"{max((count.num_machines for count in counts), default=0)}."
        )
    spent = replay.ledger
    return FleetResult(
        trace=trace.name,
        duration_s=trace.end_s,
        num_steps=spent.num_steps,
        samples=spent.samples,
        ideal_samples=ideal_samples,
        wall=spent.time_spent(spent.wall_s),
        machines=spent.time_spent(spent.machine_s),
        num_morphs=replay.num_morphs,
        num_restores=replay.num_restores,
        counts=counts,
        intervals=tuple(spent.intervals),
    )


def fleet_events(trace: FleetTrace, options: FleetOptions) -> list[tuple[float, FleetChange | str]]:
    """Changes, and the notices (a machine's name) that come before some of them, ascending in time."""
    events: list[tuple[float, int, FleetChange | str]] = []
    added_s: dict[str, float] = {}
    for change in trace.changes:
        events.append((change.time_s, 0, change))
        for name in change.removed:
            draw = random.Random(f"{options.seed}:{change.time_s}:{name}").random()
            if options.notice_s > 0 and draw >= options.sudden_share:
                notice_s = max(change.time_s - options.notice_s, added_s[name])
                events.append((notice_s, 1, name))
        added_s.update(dict.fromkeys(change.added, change.time_s))
    events.sort(key=lambda event: event[:2])
    return [(time_s, event) for time_s, _, event in events]


def _machines_over_time(trace: FleetTrace, planner: Planner) -> tuple[tuple[MachineCount, ...], float]:
    """Machines after each change, and the samples of a job that always runs the plan for them, at no cost."""
    counts: list[MachineCount] = []
    samples, count = 0.0, 0
    changes = [change for change in trace.changes if change.time_s < trace.end_s]
    ends = [*(change.time_s for change in changes[1:]), trace.end_s]
    for change, end_s in zip(changes, ends, strict=True):
        count += len(change.added) - len(change.removed)
        counts.append(MachineCount(time_s=change.time_s, num_machines=count))
        plan = planner(count)
        samples += plan.samples_per_s * (end_s - change.time_s) if plan else 0.0
    return tuple(counts), samples


def _starts(trace: FleetTrace, options: FleetOptions) -> list[tuple[float, None]]:
    """When newcomers can be used, if that is not at once."""
    if not options.start_s:
        return []
    return [(change.time_s + options.start_s, None) for change in trace.changes if change.added]


@dataclass(frozen=True)
class _Pause:
    """Nobody trains until ``end_s``."""

    activity: Activity
    end_s: float


class _Replay:
    """The job at one moment: who is there, what it does, who holds which section."""

    def __init__(self, planner: Planner, options: FleetOptions) -> None:
        self.planner = planner
        self.options = options
        self.ledger = Ledger()
        self.now_s = 0.0
        self.present: list[str] = []
        self.leaving: set[str] = set()
        self.starting: dict[str, float] = {}  # until when
        self.plan: FleetPlan | None = None
        self.slots: tuple[str, ...] = ()  # machine i of the plan
        self.used: frozenset[str] = frozenset()
        self.pauses: list[_Pause] = []
        self.wants_plan = False
        self.step_start_s = 0.0
        self.holders: list[set[str]] = []  # per section; empty before the first step
        self.needs_restore = False
        self.num_morphs = 0
        self.num_restores = 0

    # --- time goes on ---

    def advance(self, to_s: float) -> None:
        """Let the job work until then."""
        while self.now_s < to_s:
            if self.plan is None:
                self._spend(Activity.WAITING, to_s)
            elif self.pauses:
                pause = self.pauses[0]
                self._spend(pause.activity, min(to_s, pause.end_s))
                if self.now_s >= pause.end_s:
                    self.pauses.pop(0)
                    if not self.pauses:
                        self._begin()
            else:
                self._train(self.plan, to_s)

    def finish(self) -> None:
        """The trace ends: the step under way stays unfinished."""
        if self.plan is not None and not self.pauses:
            self._leave_step(Activity.UNFINISHED)

    def _spend(self, activity: Activity, end_s: float) -> None:
        self.ledger.spend(activity, self.now_s, end_s, len(self.present), self.plan)
        self.now_s = end_s

    def _train(self, plan: FleetPlan, to_s: float) -> None:
        """Finish the steps that end by then, up to the next re-plan or checkpoint, or get on with one."""
        num_steps = math.floor((to_s - self.step_start_s + _EPSILON_S) / plan.step_s)
        due_s = self.ledger.saved_s + self.options.checkpoint_interval_s
        until_due = max(1, math.ceil((due_s - self.step_start_s - _EPSILON_S) / plan.step_s))
        num_steps = min(num_steps, 1 if self.wants_plan else until_due)
        if num_steps == 0:
            self._pass_spares(to_s)
            return
        end_s = self.step_start_s + num_steps * plan.step_s
        self._pass_spares(end_s)
        self.ledger.train(self.step_start_s, num_steps, len(self.used), plan)
        self.step_start_s = self.now_s = end_s
        if num_steps >= until_due:
            self.ledger.save(end_s)
        if self.wants_plan:
            self._replan()

    def _pass_spares(self, end_s: float) -> None:
        """Those in use are accounted for when their step ends; the others now."""
        num_spares = len(self.present) - len(self.used)
        self.ledger.machine_s[Activity.SPARE] += max(0.0, end_s - self.now_s) * num_spares
        self.now_s = end_s

    def _leave_step(self, activity: Activity) -> None:
        self.ledger.spend(activity, self.step_start_s, self.now_s, len(self.used), self.plan)
        self.step_start_s = self.now_s

    # --- machines come and go ---

    def notice(self, name: str) -> None:
        """A machine will go."""
        self.leaving.add(name)
        if self.pauses and name in self.used:
            self._replan()
        self._consider()

    def ready(self) -> None:
        """Machines that have started by now can be used."""
        self.starting = {name: end_s for name, end_s in self.starting.items() if end_s > self.now_s}
        if self.plan is None:
            self._replan()
        self._consider()

    def change(self, change: FleetChange) -> None:
        """Machines go and come."""
        was_used = any(name in self.used for name in change.removed)
        self.present = [name for name in self.present if name not in change.removed]
        lost = self._take_state(change.removed)
        self.leaving.difference_update(change.removed)
        for name in change.removed:
            self.starting.pop(name, None)
        self.present += change.added
        if self.options.start_s > 0 and change.time_s > 0:
            self.starting.update(dict.fromkeys(change.added, change.time_s + self.options.start_s))
        if lost:
            self.ledger.lose(self.now_s)
            self.needs_restore = True
        if self.plan is None:
            self._replan()
        elif was_used or lost:
            if not self.pauses:
                self._leave_step(Activity.REDONE)
            self._replan()
        self._consider()

    def _take_state(self, removed: tuple[str, ...]) -> bool:
        """Machines are gone, and with them what they hold; True if some section is nowhere any more.

        Those that had notice have handed what they hold to one that stays or, if none does, to a checkpoint.
        """
        if self.needs_restore:
            return False  # nothing is held: all is in the checkpoint
        noticed = self.leaving.intersection(removed)
        staying = set(self._staying()[:1])
        for names in self.holders:
            names.difference_update(set(removed) - noticed)
        if any(not names for names in self.holders):
            return True
        if noticed and not staying:
            self.ledger.save(self.now_s)
        for names in self.holders:
            if names & noticed:
                names.difference_update(noticed)
                names.update(staying)
        return any(not names for names in self.holders)

    def _consider(self) -> None:
        """Whether the job should re-plan when the step under way has ended."""
        if self.plan is None:
            return
        better = self.planner(len(self._staying()))
        is_faster = better is not None and better.samples_per_s > self.plan.samples_per_s * (1 + 1e-9)
        self.wants_plan = is_faster or bool(self.used & self.leaving)

    def _staying(self) -> list[str]:
        return [name for name in self.present if name not in self.leaving and name not in self.starting]

    # --- generations ---

    def _replan(self) -> None:
        """A new generation for those that stay, or none if they are too few."""
        staying = self._staying()
        self.plan = self.planner(len(staying))
        self.pauses = []
        self.wants_plan = False
        if self.plan is None:
            self.slots, self.used = (), frozenset()
            return
        old = [name for name in self.slots if name in staying]
        self.slots = (*old, *(name for name in staying if name not in old))
        self.used = frozenset(self.slots[index] for index in self.plan.used_machines)
        end_s = self.now_s + self.options.morph_s
        self.pauses = [_Pause(Activity.MORPH, end_s)]
        if self.needs_restore:
            self.pauses.append(_Pause(Activity.RESTORE, end_s + self.options.restore_s))

    def _begin(self) -> None:
        """The new generation starts its first step."""
        assert self.plan is not None
        self.num_morphs += 1
        self.num_restores += self.needs_restore
        self.needs_restore = False
        self.step_start_s = self.now_s
        self.holders = [{self.slots[index] for index in machines} for machines in self.plan.holders]
