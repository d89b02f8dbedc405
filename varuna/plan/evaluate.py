"""One layout at a time: borders, shares, simulated step. What the search asks most, with everything cached.

The step is that of the slowest kind of pipeline (see ``placement.Kind``): its simulated tasks, the reduction
that outlasts them, the update. The prediction of the plan that is chosen (``predict``) is the exact one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np

from varuna.plan.borders import BorderProblem, Borders, BorderTable, Row
from varuna.plan.cluster import Cluster
from varuna.plan.decide import BACKWARD, FORWARD, RECOMPUTE, WEIGHT
from varuna.plan.pipeline import NO_DELAYS, PipelineArrays, PipelineRun, draw_delays, rules_of, run_pipeline
from varuna.plan.placement import LAYOUTS, Devices, Kind, Placement, place
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.schedule import stage_schedule
from varuna.plan.space import Point, Space, Wish
from varuna.plan.tables import Floats, Residents, SectionTable


@dataclass(frozen=True, eq=False, kw_only=True)
class KindPlan:
    """Pipelines of one kind: how many micro-batches each runs at most, and their stages."""

    kind: Kind
    num_micro_batches: int
    borders: Borders

    @property
    def finish_s(self) -> float:
        """About when the last of them is done."""
        return self.borders.value_s


@dataclass(frozen=True, eq=False, kw_only=True)
class Laid:
    """A point with a placement, a schedule and borders: all but simulated.

    Attributes:
        point, layout, schedule: which.
        kinds: per kind of pipeline.
        num_fewer: pipelines that run one micro-batch fewer than their kind; taken from the last ones.
        estimate_s: of the step.
    """

    point: Point
    placement: Placement
    schedule: str
    kinds: tuple[KindPlan, ...]
    num_fewer: int
    estimate_s: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Outcome:
    """What a simulated step came to.

    Attributes:
        laid: what was simulated.
        step_s: of the whole step.
        bubble: share of the used workers' step in which no task runs.
        memory_bytes: of the fullest device.
        spill_bytes: how far the fullest device is over its memory; not above 0 if all fit.
        num_tasks: simulated, as a measure of effort.
    """

    laid: Laid
    step_s: float
    bubble: float
    memory_bytes: int
    spill_bytes: float
    num_tasks: int


@dataclass(frozen=True, eq=False, kw_only=True)
class Tightest:
    """The stage that keeps a layout from fitting."""

    point: Point
    schedule: str
    stage_index: int
    first_section: int
    end_section: int
    needed_bytes: float
    limit_bytes: float


class Evaluator:
    """Everything about one profile, cluster and wish; caches what layouts have in common."""

    def __init__(self, profile: Profile, cluster: Cluster, wish: Wish) -> None:
        self.profile = profile
        self.wish = wish
        self.sections = SectionTable(profile)
        self.residents = Residents(profile)
        self.devices = Devices(cluster, profile.device_memory_bytes)
        self._placements: dict[tuple[int, int, int, str], Placement] = {}
        self._reductions: dict[tuple[int, bool, bool], tuple[Floats, Floats]] = {}

    def placements(self, point: Point) -> list[Placement]:
        """The layouts that differ for this point."""
        found = [self._place(point, LAYOUTS[0])]
        several = point.num_stages > 1 and point.num_pipelines > 1 and point.num_deeper == 0
        if several and point.num_pipelines <= self.devices.largest_machine and self.devices.is_uniform:
            other = self._place(point, LAYOUTS[1])
            if not other.reduces_across and found[0].reduces_across:
                found.append(other)
        return found

    def lay(
        self, point: Point, placement: Placement, schedule: str, *, frugal: bool = False, margin: float = 0.0
    ) -> Laid | None:
        """Shares and borders that leave ``margin`` bytes free (see ``BorderProblem.frugal``); None: none fit."""
        kinds = placement.kinds
        total, counts = self._num_micro_batches(point), [kind.count for kind in kinds]
        speeds = [float(kind.speed.min()) * kind.num_stages for kind in kinds]
        each_s = [1 / speed for speed in speeds]
        shares, fewer = share_out(
            total,
            counts,
            each_s,
            [(kind.num_stages - 1) * each for kind, each in zip(kinds, each_s, strict=True)],
        )
        plans: list[KindPlan] = []
        for _ in range(2 if len(kinds) > 1 else 1):
            tables = [
                BorderTable(
                    self.problem(point, placement, kind, share, schedule, frugal=frugal, margin=margin),
                    one_depth=True,
                )
                for kind, share in zip(kinds, shares, strict=True)
            ]
            found = [table.borders(kind.num_stages) for table, kind in zip(tables, kinds, strict=True)]
            plans = [
                KindPlan(kind=kind, num_micro_batches=share, borders=borders)
                for kind, share, borders in zip(kinds, shares, found, strict=True)
                if borders is not None
            ]
            if len(plans) < len(kinds):
                return None
            # borders say more exactly how fast each kind is
            each_s = [max(plan.borders.busy_s) for plan in plans]
            rest_s = [
                plan.borders.value_s - plan.num_micro_batches * each
                for plan, each in zip(plans, each_s, strict=True)
            ]
            again = share_out(total, counts, each_s, rest_s)
            if again == (shares, fewer):
                break
            shares, fewer = again
        return Laid(
            point=point,
            placement=placement,
            schedule=schedule,
            kinds=tuple(plans),
            num_fewer=sum(plan.num_micro_batches * plan.kind.count for plan in plans) - total,
            estimate_s=max(plan.borders.value_s for plan in plans) + self.profile.step_overhead_s,
        )

    def bound_s(self, point: Point, placement: Placement, schedule: str) -> float:
        """No borders make a step of this point, placement and schedule shorter; infinite if none fit."""
        kinds = placement.kinds
        if len(kinds) > 1:  # shares are free: what one pipeline gains another loses
            return point.bound_s
        share = -(-self._num_micro_batches(point) // kinds[0].count)
        problem = self.problem(point, placement, kinds[0], share, schedule, frugal=True, bound=True)
        bound_s = BorderTable(problem, tail_weight=0.0, one_depth=True).value_s(kinds[0].num_stages)
        if point.num_pipelines == 1:  # the only pipeline has the short micro-batch
            bound_s *= self.wish.batch_size / (share * point.micro_batch_size)
        return max(point.bound_s, bound_s + self.profile.step_overhead_s)

    def problem(
        self,
        point: Point,
        placement: Placement,
        kind: Kind,
        num_micro_batches: int,
        schedule: str,
        *,
        frugal: bool,
        margin: float = 0.0,
        bound: bool = False,
    ) -> BorderProblem:
        """What a table of borders is made of."""
        recompute = self.wish.recompute
        flags = recompute if isinstance(recompute, tuple) else (recompute,) * kind.num_stages
        across = self.profile.across_machines
        if not bound:
            across = replace(across, bytes_per_s=across.bytes_per_s / self._slowdown(point, placement, kind))
        rows = [
            Row(
                memory_bytes=float(kind.memory_bytes[stage]) - margin,
                speed=float(kind.speed[stage]),
                link=across if kind.crosses[stage] else self.profile.within_machine,
                recompute=flags[stage],
            )
            for stage in range(kind.num_stages - 1, -1, -1)
        ]
        shared = point.num_pipelines > 1
        return BorderProblem(
            runs=self.sections.runs(point.micro_batch_size),
            resident_bytes=self.residents.shared_bytes if shared else self.residents.alone_bytes,
            late_s=self.late_s(point, placement, kind, schedule, bound=bound),
            num_micro_batches=num_micro_batches,
            schedule=schedule,
            rows=rows,
            task_overhead_s=self.profile.task_overhead_s,
            frugal=frugal,
        )

    def _slowdown(self, point: Point, placement: Placement, kind: Kind) -> float:
        """About how much longer a message takes because others leave the same machine."""
        link = self.profile.across_machines
        if not link.shared_bytes_per_s:
            return 1.0
        runs = self.sections.runs(point.micro_batch_size)
        cycle_s = (runs.forward_s[-1] + runs.backward_s[-1]) / kind.num_stages / float(kind.speed.min())
        mean_bytes = float(np.mean(runs.forward_bytes[1:-1])) if len(runs.forward_bytes) > 2 else 0.0
        share = min(1.0, mean_bytes / link.bytes_per_s / max(cycle_s, 1e-12))
        streams = 1 + (placement.streams_per_machine - 1) * share
        return max(1.0, streams * link.bytes_per_s / link.shared_bytes_per_s)

    def link(self, crosses: bool) -> LinkProfile:
        """Between two stages."""
        return self.profile.across_machines if crosses else self.profile.within_machine

    def late_s(
        self, point: Point, placement: Placement, kind: Kind, schedule: str, *, bound: bool = False
    ) -> Floats:
        """``[S + 1, S + 1]``: seconds from a stage's last task until its gradients are reduced (``reductions``).

        They leave section by section while the last backward (or weight task) goes on, from the last section to
        the first. The bound: all of them while it does.
        """
        num, across = point.num_pipelines, placement.reduces_across
        apart = across or bool(kind.crosses.any())
        if (num, across, apart) not in self._reductions:
            self._reductions[num, across, apart] = (
                self.residents.reduce_s(num, across),
                self.residents.ties_s(num, apart),
            )
        reduce_s, ties_s = self._reductions[num, across, apart]
        runs = self.sections.runs(point.micro_batch_size)
        last = (runs.weight_s if schedule == "zero-bubble" else runs.backward_s) / float(kind.speed.min())
        whole = np.maximum(0.0, last[None, :] - last[:, None])
        link = self.profile.across_machines
        share = link.bytes_per_s / link.shared_bytes_per_s if link.shared_bytes_per_s else 0.0
        if across:
            reduce_s = reduce_s * max(1.0, placement.groups_per_machine * share)
        if apart:
            ties_s = ties_s * max(1.0, (1 + placement.groups_per_machine * across) * share)
        if bound:
            return np.asarray(np.maximum(reduce_s - whole, ties_s))
        own = np.diff(last, prepend=0.0)  # of the section before an index
        first = np.append(
            np.diagonal(reduce_s, offset=1), 0.0
        )  # of the section at an index, the last to be ready
        return np.asarray(np.maximum(first[:, None], reduce_s - whole + own[None, :]) + ties_s)

    def tightest(self, point: Point) -> Tightest:
        """With borders that would be the fastest if there were memory enough: the stage furthest from fitting."""
        placement = self.placements(point)[0]
        kind, schedule = placement.kinds[0], self.wish.schedules_of(split=point.split)[0]
        share = -(-self._num_micro_batches(point) // point.num_pipelines)
        table = BorderTable(
            self.problem(point, placement, kind, share, schedule, frugal=True, margin=-np.inf), one_depth=True
        )
        found = table.borders(kind.num_stages)
        assert found is not None, "borders without a limit"
        return self._tightest_of(point, kind, schedule, table, found.borders)

    def least_memory(self, space: Space) -> Tightest:
        """The tightest stage of the layout that needs least memory: deepest pipelines, smallest micro-batches."""
        order = np.lexsort((space.micro_batch_size, -space.num_pipelines, -space.num_stages))
        found: list[Tightest] = []
        for split in (False, True):
            points = [index for index in order.tolist() if space.split[index] == split]
            if points:
                found += self._least_memory(space.point(points[0]))
        return min(found, key=lambda tightest: tightest.needed_bytes - tightest.limit_bytes)

    def _least_memory(self, point: Point) -> list[Tightest]:
        placement = self.placements(point)[0]
        kind = placement.kinds[0]
        share = -(-self._num_micro_batches(point) // point.num_pipelines)
        found = []
        for schedule in self.wish.schedules_of(split=point.split):
            low, high = 0.0, 1e18  # a margin below 0 is memory that is not there
            table = None
            while high - low > 1e-4 * high:
                middle = (low * high) ** 0.5 if low > 1 else high / 1e3
                problem = self.problem(point, placement, kind, share, schedule, frugal=True, margin=-middle)
                trial = BorderTable(problem, one_depth=True)
                if np.isfinite(trial.value_s(kind.num_stages)):
                    high, table = middle, trial
                else:
                    low = middle
            borders = table.borders(kind.num_stages) if table is not None else None
            if table is not None and borders is not None:
                found.append(self._tightest_of(point, kind, schedule, table, borders.borders))
        return found

    @staticmethod
    def _tightest_of(
        point: Point, kind: Kind, schedule: str, table: BorderTable, borders: Sequence[int]
    ) -> Tightest:
        needs = [
            table.least_bytes(kind.num_stages - stage, *ends) for stage, ends in enumerate(pairwise(borders))
        ]
        over = [need - limit for need, limit in zip(needs, kind.memory_bytes.tolist(), strict=True)]
        stage = int(np.argmax(over))
        return Tightest(
            point=point,
            schedule=schedule,
            stage_index=stage,
            first_section=borders[stage],
            end_section=borders[stage + 1],
            needed_bytes=needs[stage],
            limit_bytes=float(kind.memory_bytes[stage]),
        )

    def simulate(self, laid: Laid, *, num_seeds: int = 1, free_communication: bool = False) -> Outcome:
        """Run the step of every kind; with jitter, the mean over ``num_seeds`` draws."""
        step_s, busy_s, used, memory, spill, tasks = 0.0, 0.0, 0, 0.0, -np.inf, 0
        for plan in laid.kinds:
            arrays = self.arrays(laid, plan)
            if free_communication:
                arrays = replace(
                    arrays,
                    transmit_s=0 * arrays.transmit_s,
                    latency_s=0 * arrays.latency_s,
                    send_s=0 * arrays.send_s,
                )
            jitter = any(self.link(bool(crosses)).jitter_s for crosses in plan.kind.crosses[:-1])
            jitter = jitter and not free_communication
            found = []
            for seed in range(num_seeds if jitter else 1):
                run = run_pipeline(self._drawn(arrays, plan, seed) if jitter else arrays)
                found.append(self._step_s(laid, plan, run, free_communication=free_communication))
                tasks += int(arrays.num_micro_batches * len(arrays.rules) * 3)
            step_s = max(step_s, float(np.mean(found)))
            busy_s += plan.kind.count * float(run.busy_s.sum())
            used += plan.kind.count * plan.kind.num_stages
            needs = self._memory_bytes(laid, plan, run)
            memory = max(memory, float(needs.max()))
            spill = max(spill, float((needs - plan.kind.memory_bytes).max()))
        return Outcome(
            laid=laid,
            step_s=step_s,
            bubble=max(0.0, 1 - busy_s / used / step_s),
            memory_bytes=int(memory),
            spill_bytes=spill,
            num_tasks=tasks,
        )

    def arrays(self, laid: Laid, plan: KindPlan) -> PipelineArrays:
        """A pipeline of this kind as the simulator takes it."""
        runs = self.sections.runs(laid.point.micro_batch_size)
        edges = np.array(plan.borders.borders)
        first, end = edges[:-1], edges[1:]
        speed, overhead_s = plan.kind.speed, self.profile.task_overhead_s
        schedules = [
            stage_schedule(
                laid.schedule,
                num_stages=plan.kind.num_stages,
                stage_index=stage,
                num_micro_batches=plan.num_micro_batches,
                recompute=plan.borders.recompute,
                max_in_flight=plan.borders.max_in_flight[stage],
            )
            for stage in range(plan.kind.num_stages)
        ]
        split = laid.schedule == "zero-bubble"
        durations_s = np.zeros((plan.kind.num_stages, 2, 5))
        weight_s = (runs.weight_s[end] - runs.weight_s[first]) if split else 0.0 * first
        durations_s[:, :, FORWARD] = self._both((runs.forward_s[end] - runs.forward_s[first]) / speed)
        durations_s[:, :, RECOMPUTE] = self._both((runs.recompute_s[end] - runs.recompute_s[first]) / speed)
        backward_s = runs.backward_s[end] - runs.backward_s[first] - weight_s
        durations_s[:, :, BACKWARD] = self._both(backward_s / speed)
        durations_s[:, :, WEIGHT] = self._both(weight_s / speed)
        durations_s[:, :, 1:] += overhead_s
        links = [self.link(bool(crosses)) for crosses in plan.kind.crosses]
        back = [links[0], *links[:-1]]  # the link over which a stage sends gradients
        transmit_s = np.zeros((plan.kind.num_stages, 2, 2))
        alone_s = np.stack(
            [
                runs.forward_bytes[end] / np.array([link.bytes_per_s for link in links]),
                runs.backward_bytes[first] / np.array([link.bytes_per_s for link in back]),
            ],
            axis=1,
        )
        transmit_s[:] = (alone_s * self._slowdowns(laid, plan, alone_s))[:, :, None]
        received = runs.forward_bytes[first]
        activations = runs.activation_bytes[end] - runs.activation_bytes[first]
        drops = np.array([schedule.recompute for schedule in schedules])
        kept_bytes = np.stack(
            [
                received + np.where(drops, 0.0, activations),
                np.where(drops, activations, 0.0),
                runs.weight_bytes[end] - runs.weight_bytes[first],
            ],
            axis=1,
        )
        return PipelineArrays(
            num_micro_batches=plan.num_micro_batches,
            rules=rules_of(schedules),
            durations_s=durations_s,
            transmit_s=transmit_s,
            latency_s=np.array([[a.latency_s, b.latency_s] for a, b in zip(links, back, strict=True)]),
            send_s=np.array([[a.send_s, b.send_s] for a, b in zip(links, back, strict=True)]),
            delays_s=NO_DELAYS,
            start_s=self.residents.update_s[first, end] / speed,
            kept_bytes=kept_bytes,
        )

    def _slowdowns(self, laid: Laid, plan: KindPlan, alone_s: Floats) -> Floats:
        """``[P, 2]``: how much longer messages take because others leave the same machine (see ``arrays``)."""
        link = self.profile.across_machines
        slowdowns = np.ones_like(alone_s)
        if not link.shared_bytes_per_s or not plan.kind.crosses.any():
            return slowdowns
        machine = self.devices.machine
        leaving = np.zeros(int(machine.max()) + 1)
        share = np.minimum(1.0, alone_s / max(max(plan.borders.busy_s), 1e-12))
        for kind in laid.placement.kinds:
            if kind.num_stages != len(share):
                continue  # of another depth: few, and left out here
            out = kind.crossing
            back = np.roll(out, 1, axis=1)
            for direction, sends in enumerate((out, back)):
                weights = np.where(sends, share[:, direction], 0.0)
                leaving += np.bincount(machine[kind.workers].ravel(), weights.ravel(), len(leaving))
        own = plan.kind.workers[plan.kind.representative]
        crosses = np.stack([plan.kind.crosses, np.roll(plan.kind.crosses, 1)], axis=1)
        streams = 1.0 + leaving[machine[own]][:, None] - share
        return np.where(crosses, np.maximum(1.0, streams * link.bytes_per_s / link.shared_bytes_per_s), 1.0)

    @staticmethod
    def _both(values: Floats) -> Floats:
        """The same for the last micro-batch as for the others."""
        return np.repeat(values[:, None], 2, axis=1)

    def _drawn(self, arrays: PipelineArrays, plan: KindPlan, seed: int) -> PipelineArrays:
        links = [self.link(bool(crosses)) for crosses in plan.kind.crosses]
        back = [links[0], *links[:-1]]
        quantiles = [link.jitter_s for pair in zip(links, back, strict=True) for link in pair]
        return replace(arrays, delays_s=draw_delays(quantiles, plan.num_micro_batches, seed))

    def _step_s(self, laid: Laid, plan: KindPlan, run: PipelineRun, *, free_communication: bool) -> float:
        """The end of the last reduction of this kind's stages, and what every step costs besides."""
        if free_communication:
            return run.makespan_s + self.profile.step_overhead_s
        edges = np.array(plan.borders.borders)
        late_s = self.late_s(laid.point, laid.placement, plan.kind, laid.schedule)[edges[:-1], edges[1:]]
        return float((run.end_s + late_s).max()) + self.profile.step_overhead_s

    def _memory_bytes(self, laid: Laid, plan: KindPlan, run: PipelineRun) -> Floats:
        runs = self.sections.runs(laid.point.micro_batch_size)
        edges = plan.borders.borders
        shared = laid.point.num_pipelines > 1
        resident = self.residents.shared_bytes if shared else self.residents.alone_bytes
        waiting = run.peak_waiting
        return np.array(
            [
                resident[first, end]
                + run.peak_bytes[stage]
                + runs.workspace_bytes[first:end].max()
                + max(1, waiting[stage, 0]) * runs.forward_bytes[first]
                + max(1, waiting[stage, 1]) * runs.backward_bytes[end]
                + runs.backward_bytes[first]
                for stage, (first, end) in enumerate(pairwise(edges))
            ]
        )

    def _num_micro_batches(self, point: Point) -> int:
        return -(-self.wish.batch_size // point.micro_batch_size)

    def _place(self, point: Point, layout: str) -> Placement:
        key = (point.num_stages, point.num_pipelines, point.num_deeper, layout)
        if key not in self._placements:
            depths, counts = [point.num_stages], [point.num_pipelines - point.num_deeper]
            if point.num_deeper:
                depths.append(point.num_stages + 1)
                counts.append(point.num_deeper)
            pairs = [(depth, count) for depth, count in zip(depths, counts, strict=True) if count]
            self._placements[key] = place(
                self.devices, [depth for depth, _ in pairs], [count for _, count in pairs], layout
            )
        return self._placements[key]


def share_out(
    total: int, counts: Sequence[int], each_s: Sequence[float], first_s: Sequence[float]
) -> tuple[list[int], int]:
    """Micro-batches for each pipeline of each kind, so that the last to finish is as early as it can be.

    Args:
        total: micro-batches; at least one for each pipeline.
        counts: pipelines of each kind.
        each_s: seconds per micro-batch.
        first_s: seconds besides.

    Returns:
        Per kind, and how many pipelines (of the kinds that finish last) get one fewer.
    """
    if len(counts) == 1:
        share = -(-total // counts[0])
        return [share], share * counts[0] - total

    def shares_by(time_s: float) -> list[int]:
        return [max(1, int((time_s - first) / each)) for first, each in zip(first_s, each_s, strict=True)]

    low_s, high_s = 0.0, max(first_s) + max(each_s) * (total + 1)
    for _ in range(60):
        middle_s = (low_s + high_s) / 2
        if sum(count * share for count, share in zip(counts, shares_by(middle_s), strict=True)) >= total:
            high_s = middle_s
        else:
            low_s = middle_s
    shares = shares_by(high_s)
    return shares, sum(count * share for count, share in zip(counts, shares, strict=True)) - total
