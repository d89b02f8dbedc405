"""Best first: the layout that promises most is looked at more closely next, until no other can be better.

A point (``points.py``) has a lower bound and an estimate that cost nothing; a table of borders gives a closer
estimate, a simulation the time. What has a bound not below the best simulated time is left where it is.
So is what would still be slower if its estimate were as far too high as any estimate of its kind was so far.
Then the neighbours of the best are looked at: sizes in between, left-over workers in deeper pipelines, borders
moved by one section. Effort is counted in simulated tasks, not in seconds: how busy a machine is changes no
answer.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from varuna.plan.borders import BorderTable
from varuna.plan.lay import Laid, border_problem, lay_out, placements_of
from varuna.plan.outcome import Outcome, simulate
from varuna.plan.placement import Placement
from varuna.plan.points import Point, PointMaker, Points
from varuna.plan.setting import Setting

CLOSE = 0.005
"""A layout that cannot be better than by this share is not looked at more closely."""

BUDGET, BUDGET_PER_WORKER, MOST_WORKERS = 100_000, 170, 10_000
"""Simulated tasks that a search may cost, from the first layout that fits on, before it ends with the best."""

UNTIL_ONE_FITS = 10
"""So many budgets it may cost to find one that fits."""

TABLE_COST = 4_000
"""Simulated tasks that take as long as one table of borders."""

ENOUGH_RATIOS = 10
"""Simulations after which one knows how far estimates are off."""

CAUTION = 0.95
"""How much further than ever before an estimate may be off."""

DOUBT = 3
"""As many simulations that would have agreed with their estimates are added to those that were run."""

NUM_NEAR = 3
"""Points whose neighbours are looked at."""

REPAIRS = 3
"""How often borders are sought again with more memory left free, because messages that wait did not fit."""

DOES_NOT_FIT = "does not fit"
BY_ESTIMATE = "slower by its estimate"


@dataclass(frozen=True, eq=False, kw_only=True)
class Ruled:
    """A point that is no outcome with a schedule; empty ``why``: by its bound; bytes if a simulation told."""

    point: Point
    schedule: str
    why: str
    needed_bytes: int = 0


@dataclass(frozen=True, eq=False, kw_only=True)
class _Next:
    """What is to be laid out, or, if it is, to be simulated."""

    point: Point
    placement: Placement
    schedule: str
    laid: Laid | None = None

    @property
    def key(self) -> Hashable:
        """What has estimates that are off alike."""
        return (self.placement.layout, self.schedule)


@dataclass(eq=False, kw_only=True)
class Search:
    """What was found so far.

    Attributes:
        setting, maker: what for.
        patience: how many times the usual effort may be spent.
        points: where it started; empty before ``run``.
        outcomes: everything simulated that fits, in the order of simulation.
        ruled: what was looked at more closely and not simulated.
        opened: which of ``points`` were looked at more closely.
        is_complete: False if the budget ended the search.
        effort: spent, in simulated tasks.
        best: the fastest so far.
    """

    setting: Setting
    maker: PointMaker
    patience: float = 1.0
    points: Points | None = None
    outcomes: list[Outcome] = field(default_factory=list)
    ruled: list[Ruled] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)
    is_complete: bool = True
    effort: int = 0
    best: Outcome | None = None
    _waiting: dict[Hashable, list[tuple[float, int, _Next | None]]] = field(default_factory=dict)
    _counter: Iterator[int] = field(default_factory=itertools.count)
    _ratios: dict[Hashable, list[float]] = field(default_factory=dict)
    _corrections: dict[Hashable, float] = field(default_factory=dict)

    def run(self) -> None:
        """Search."""
        workers = min(MOST_WORKERS, self.setting.devices.num_workers)
        budget = int(self.patience * (BUDGET + BUDGET_PER_WORKER * workers))
        self.points = self.maker.all()
        self.opened = self._explore(self.points, budget)
        near: dict[Hashable, Point] = {}
        for outcome in sorted(self.outcomes, key=lambda outcome: outcome.step_s):
            point = outcome.laid.point
            near.setdefault((point.num_stages, point.num_pipelines, point.split), point)
        for point in itertools.islice(near.values(), NUM_NEAR):
            self._explore(self.maker.near(point), budget + budget // 4)
        if self.best is not None:
            self._spare(self.best.laid)
            self._polish(self.best, self.effort + budget // 8)

    def _spare(self, best: Laid) -> None:
        """Simulate the best without its deeper pipelines, some workers spare.

        Pipelines with unlike borders sum gradients one group after the other, which only a whole plan's
        prediction tells.
        """
        if not best.point.num_deeper:
            return
        near = self.maker.near(best.point)
        alike = (near.num_deeper == 0) & (near.micro_batch_size == best.point.micro_batch_size)
        for index in np.flatnonzero(alike).tolist():
            for placement in placements_of(self.setting, near[index]):
                laid = self._lay(near[index], placement, best.schedule)
                if laid is not None:
                    self._simulate(laid)

    @property
    def _enough_s(self) -> float:
        """What cannot be below this is not worth a look."""
        return self.best.step_s * (1 - CLOSE) if self.best else np.inf

    def _explore(self, points: Points, budget: int) -> set[int]:
        """Look at points, most promising first; returns which were opened."""
        known = {_shape(outcome.laid.point) for outcome in self.outcomes}
        order = np.argsort(points.estimate_s, kind="stable")
        order = order[points.fits[order]]
        columns = (points.estimate_s, points.split, points.num_stages, points.num_pipelines)
        rows = zip(order.tolist(), *(column[order].tolist() for column in columns), strict=True)
        for index, estimate_s, split, num_stages, num_pipelines in rows:
            kind = self._kind(split, num_stages, num_pipelines)
            self._waiting.setdefault(kind, []).append((estimate_s, index, None))
        opened: set[int] = set()
        while any(self._waiting.values()):
            if self.effort > (budget if self.best else UNTIL_ONE_FITS * budget):
                self.is_complete = False
                self._waiting.clear()
                break
            key = min(self._waiting, key=self._expected_s)
            estimate_s, index, following = heapq.heappop(self._waiting[key])
            if following is not None:
                self._advance(following, estimate_s)
                continue
            is_hopeless = points.bound_s[index] >= self._enough_s or self._is_hopeless(key, estimate_s)
            if not is_hopeless and _shape(points[index]) not in known:
                opened.add(index)
                self._open(points[index])
        return opened

    def _expected_s(self, key: Hashable) -> float:
        """Step time of the most promising that waits, if its estimate is off as those of its kind are."""
        waiting = self._waiting[key]
        return waiting[0][0] * self._correction(key) if waiting else np.inf

    def _correction(self, key: Hashable) -> float:
        """What estimates of a kind have to be multiplied with on average, but near 1 while little is known."""
        return self._corrections.get(key, 1.0)

    def _open(self, point: Point) -> None:
        """Find borders for the first schedule; the others wait with its estimate."""
        schedules = self.setting.wish.schedules_of(split=point.split)
        for placement in placements_of(self.setting, point):
            estimate_s = point.estimate_s
            for schedule in schedules:
                following = _Next(point=point, placement=placement, schedule=schedule)
                if schedule != schedules[0]:
                    self._push(estimate_s, following)
                    continue
                found_s = self._advance(following, estimate_s)
                if found_s is not None:
                    estimate_s = found_s
                    kind = self._kind(point.split, point.num_stages, point.num_pipelines)
                    self._learn(kind, found_s * self._correction(following.key), point.estimate_s)

    def _advance(self, following: _Next, estimate_s: float) -> float | None:
        """Lay out what is not, simulate what is, unless it has become hopeless. Returns a closer estimate."""
        point, schedule = following.point, following.schedule
        if point.bound_s >= self._enough_s:
            self._rule_out(point, schedule, "")
            return None
        if self._is_hopeless(following.key, estimate_s):
            self._rule_out(point, schedule, BY_ESTIMATE)
            return None
        laid = following.laid
        if laid is None:
            laid = self._lay(point, following.placement, schedule)
            if laid is None:
                self._rule_out(point, schedule, DOES_NOT_FIT)
                return None
            if self.best:  # while there is nothing to compare with, simulate at once
                self._push(laid.estimate_s, replace(following, laid=laid))
                return laid.estimate_s
        self._simulate(laid)
        return laid.estimate_s

    def _push(self, estimate_s: float, following: _Next) -> None:
        entry = (estimate_s, next(self._counter), following)
        heapq.heappush(self._waiting.setdefault(following.key, []), entry)

    def _lay(self, point: Point, placement: Placement, schedule: str, margin_bytes: float = 0.0) -> Laid | None:
        for frugal in (False, True):
            self.effort += TABLE_COST * len(placement.kinds)
            laid = lay_out(self.setting, point, placement, schedule, frugal=frugal, margin_bytes=margin_bytes)
            if laid is not None:
                break
        return laid

    def _simulate(self, laid: Laid) -> None:
        margin_bytes = 0.0
        for _ in range(REPAIRS):
            outcome = simulate(self.setting, laid)
            self.effort += outcome.num_tasks
            if outcome.spill_bytes <= 0:
                self._keep(outcome)
                return
            margin_bytes += outcome.spill_bytes
            again = self._lay(laid.point, laid.placement, laid.schedule, margin_bytes)
            if again is None:
                break
            laid = again
        self._rule_out(laid.point, laid.schedule, DOES_NOT_FIT, outcome.memory_bytes)

    def _keep(self, outcome: Outcome) -> None:
        """Add an outcome, and learn how far its estimates were off."""
        self.outcomes.append(outcome)
        if self.best is None:
            self.effort = 0
        if self.best is None or outcome.step_s < self.best.step_s:
            self.best = outcome
        laid = outcome.laid
        point = laid.point
        self._learn((laid.placement.layout, laid.schedule), outcome.step_s, laid.estimate_s)
        self._learn(
            self._kind(point.split, point.num_stages, point.num_pipelines), outcome.step_s, point.estimate_s
        )

    def _learn(self, key: Hashable, step_s: float, estimate_s: float) -> None:
        ratios = self._ratios.setdefault(key, [])
        ratios.append(step_s / max(estimate_s, 1e-12))
        self._corrections[key] = (DOUBT + sum(ratios)) / (DOUBT + len(ratios))

    def _kind(self, split: bool, num_stages: int, num_pipelines: int) -> Hashable:
        """Points whose estimates are off alike: those whose replicas may share machines are apart."""
        return (split, num_stages <= self.setting.devices.num_whole_groups(num_pipelines))

    def _is_hopeless(self, key: Hashable, estimate_s: float) -> bool:
        ratios = self._ratios.get(key, [])
        if self.best is None or len(ratios) < ENOUGH_RATIOS:
            return False
        return estimate_s * min(ratios) * CAUTION >= self.best.step_s

    def _polish(self, outcome: Outcome, budget: int) -> None:
        """Move one border at a time by one section, as long as the simulated step gets shorter."""
        laid = outcome.laid
        if len(laid.kinds) > 1:
            return
        plan = laid.kinds[0]
        problem = border_problem(
            self.setting,
            laid.point,
            laid.placement,
            plan.kind,
            num_micro_batches=plan.num_micro_batches,
            schedule=laid.schedule,
            frugal=laid.frugal,
            margin_bytes=laid.margin_bytes,
        )
        table = BorderTable(problem, one_depth=True)
        moves = itertools.cycle((i, by) for i in range(1, plan.kind.num_stages) for by in (1, -1))
        num_vain = 0
        while num_vain < 2 * (plan.kind.num_stages - 1) and self.effort < budget:
            moved = list(plan.borders.borders)
            index, by = next(moves)
            moved[index] += by
            num_vain += 1
            if not moved[index - 1] < moved[index] < moved[index + 1]:
                continue
            borders = table.at(moved)
            if borders is None:
                continue
            plan_moved = replace(plan, borders=borders)
            trial = simulate(self.setting, replace(laid, kinds=(plan_moved,)))
            self.effort += trial.num_tasks
            if trial.spill_bytes <= 0 and trial.step_s < outcome.step_s * (1 - 1e-6):
                outcome, plan, num_vain = trial, plan_moved, 0
        if outcome is not self.best:
            self.outcomes.append(outcome)
            self.best = outcome

    def _rule_out(self, point: Point, schedule: str, why: str, needed_bytes: int = 0) -> None:
        self.ruled.append(Ruled(point=point, schedule=schedule, why=why, needed_bytes=needed_bytes))


def _shape(point: Point) -> Hashable:
    return (
        point.num_stages,
        point.num_pipelines,
        point.micro_batch_size,
        point.num_deeper,
        point.split,
    )
