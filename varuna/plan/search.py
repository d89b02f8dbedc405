"""Best first: the layout that promises most is looked at more closely next, until no other can be better.

A point (``space.py``) has a lower bound that costs nothing; a table of borders gives a closer one, and an estimate;
a simulation gives the time. Whatever's bound is not below the best simulated time is left where it is. Effort is
counted in simulated tasks and tables, not in seconds, so the answer does not depend on how busy a machine is.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Hashable, Iterator
from dataclasses import dataclass, field, replace

import numpy as np

from varuna.plan.evaluate import Evaluator, Laid, Outcome
from varuna.plan.placement import Placement
from varuna.plan.space import Point, Space

CLOSE = 0.002
"""A layout that cannot be better than by this share is not looked at more closely."""

BUDGET = 6_000_000
"""Simulated tasks that a search may cost."""

TABLE_COST = 6_000
"""Simulated tasks that take as long as one table of borders."""

ENOUGH_RATIOS = 6
"""Simulations after which one knows how far estimates are off."""

CAUTION = 0.98
"""What an estimate may be off more than ever before."""

BY_ESTIMATE = "slower by its estimate"
"""Why something was not simulated although its bound left it open."""

REPAIRS = 3
"""How often borders are sought again with more memory left free, when messages that wait did not fit."""


@dataclass(frozen=True, eq=False, kw_only=True)
class Ruled:
    """A point (and placement and schedule, if that is what the bound is for) that was not simulated, and why."""

    point: Point
    schedule: str
    bound_s: float
    why: str


@dataclass(frozen=True, eq=False, kw_only=True)
class _Next:
    """What is to be laid out, or, if it is, to be simulated."""

    point: Point
    placement: Placement
    schedule: str
    bound_s: float
    laid: Laid | None = None

    @property
    def key(self) -> Hashable:
        """What has estimates that are off alike."""
        return (self.placement.layout, self.schedule)


@dataclass(eq=False, kw_only=True)
class Search:
    """What a search found so far.

    Attributes:
        outcomes: everything simulated that fits, in the order of simulation.
        ruled: what was looked at more closely and not simulated.
        num_left: points whose bound is not below the best, never looked at.
        is_complete: False if the budget ended the search.
    """

    evaluator: Evaluator
    space: Space
    outcomes: list[Outcome] = field(default_factory=list)
    ruled: list[Ruled] = field(default_factory=list)
    opened: set[int] = field(default_factory=set)
    is_complete: bool = True
    effort: int = 0
    _counter: Iterator[int] = field(default_factory=itertools.count)
    _ratios: dict[Hashable, list[float]] = field(default_factory=dict)

    @property
    def best_s(self) -> float:
        """Step time of the best so far."""
        return min((outcome.step_s for outcome in self.outcomes), default=np.inf)

    def run(self) -> None:
        """Fill ``outcomes`` and ``ruled``."""
        heap: list[tuple[float, int, _Next]] = []
        points = self._points()
        index = next(points, None)
        while index is not None or heap:
            if self.effort > BUDGET and self.outcomes:
                self.is_complete = False
                return
            if index is not None and (not heap or self.space.estimate_s[index] <= heap[0][0]):
                if self.space.bound_s[index] < self._enough_s:
                    point = self.space.point(index)
                    if not self._is_hopeless(self._kind_of(point), point.estimate_s):
                        self.opened.add(index)
                        self._open(point, heap)
                index = next(points, None)
                continue
            following = heapq.heappop(heap)[2]
            if following.bound_s >= self._enough_s:
                self._rule_out(following.point, following.schedule, following.bound_s, "")
            elif following.laid and self._is_hopeless(following.key, following.laid.estimate_s):
                self._rule_out(following.point, following.schedule, following.bound_s, BY_ESTIMATE)
            elif following.laid is not None:
                self._simulate(following.laid)
            else:
                self._lay_out(following, heap)

    def _is_hopeless(self, key: Hashable, estimate_s: float) -> bool:
        """Whether it would be slower than the best even if its estimate were as far too high as any so far."""
        ratios = self._ratios.get(key, [])
        return len(ratios) >= ENOUGH_RATIOS and estimate_s * min(ratios) * CAUTION >= self.best_s

    def _learn(self, outcome: Outcome) -> None:
        """How far estimates are from the simulation."""
        point = outcome.laid.point
        key = (outcome.laid.placement.layout, outcome.laid.schedule)
        self._ratios.setdefault(key, []).append(outcome.step_s / outcome.laid.estimate_s)
        self._ratios.setdefault(self._kind_of(point), []).append(outcome.step_s / point.estimate_s)

    def _kind_of(self, point: Point) -> Hashable:
        """Points whose estimates are off alike: those whose replicas may share a machine are apart."""
        return (point.split, point.num_pipelines <= self.evaluator.devices.largest_machine)

    @property
    def _enough_s(self) -> float:
        """What cannot be below this is not worth a look."""
        return self.best_s * (1 - CLOSE)

    def _points(self) -> Iterator[int]:
        """Those that may fit, most promising first."""
        order = np.argsort(self.space.estimate_s, kind="stable")
        yield from order[self.space.fits[order]].tolist()

    def _open(self, point: Point, heap: list[tuple[float, int, _Next]]) -> None:
        """Find borders for the first schedule; the others come with its estimate."""
        schedules = self.evaluator.wish.schedules_of(split=point.split)
        for placement in self.evaluator.placements(point):
            bound_s = self._bound_s(point, placement, schedules[0])
            if bound_s >= self._enough_s:
                self._rule_out(point, "", bound_s, "" if np.isfinite(bound_s) else "does not fit")
                continue
            estimate_s = point.estimate_s
            for schedule in schedules:
                following = _Next(point=point, placement=placement, schedule=schedule, bound_s=bound_s)
                if schedule == schedules[0]:
                    estimate_s = self._lay_out(following, heap) or estimate_s
                else:
                    self._push(heap, estimate_s, following)

    def _lay_out(self, following: _Next, heap: list[tuple[float, int, _Next]]) -> float | None:
        """Find borders; simulate at once while there is nothing to compare with. Returns the estimate."""
        laid = self._lay(following.point, following.placement, following.schedule)
        if laid is None:
            self._rule_out(following.point, following.schedule, following.bound_s, "does not fit")
            return None
        if self.outcomes:
            self._push(heap, laid.estimate_s, replace(following, laid=laid))
        else:
            self._simulate(laid)
        return laid.estimate_s

    def _push(self, heap: list[tuple[float, int, _Next]], estimate_s: float, following: _Next) -> None:
        heapq.heappush(heap, (estimate_s, next(self._counter), following))

    def _bound_s(self, point: Point, placement: Placement, schedule: str) -> float:
        self.effort += TABLE_COST
        return self.evaluator.bound_s(point, placement, schedule)

    def _lay(self, point: Point, placement: Placement, schedule: str, margin: float = 0.0) -> Laid | None:
        self.effort += TABLE_COST
        laid = self.evaluator.lay(point, placement, schedule, margin=margin)
        if laid is None:
            self.effort += TABLE_COST
            laid = self.evaluator.lay(point, placement, schedule, frugal=True, margin=margin)
        return laid

    def _simulate(self, laid: Laid) -> None:
        margin = 0.0
        for _ in range(REPAIRS):
            outcome = self.evaluator.simulate(laid)
            self.effort += outcome.num_tasks
            if outcome.spill_bytes <= 0:
                self.outcomes.append(outcome)
                self._learn(outcome)
                return
            margin += outcome.spill_bytes
            again = self._lay(laid.point, laid.placement, laid.schedule, margin)
            if again is None:
                break
            laid = again
        self._rule_out(laid.point, laid.schedule, outcome.step_s, "does not fit")

    def _rule_out(self, point: Point, schedule: str, bound_s: float, why: str) -> None:
        self.ruled.append(Ruled(point=point, schedule=schedule, bound_s=bound_s, why=why))
