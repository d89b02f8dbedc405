"""One point laid out: where its pipelines are, how many micro-batches each runs, and their stage borders."""

from __future__ import annotations

from dataclasses import dataclass

from varuna.plan.borders import BorderProblem, Borders, BorderTable
from varuna.plan.placement import LAYOUTS, Kind, Placement
from varuna.plan.points import Point
from varuna.plan.setting import Setting
from varuna.plan.shares import Shares, share_out


@dataclass(frozen=True, eq=False, kw_only=True)
class KindPlan:
    """Pipelines of one kind: how many micro-batches each runs at most, and their stages."""

    kind: Kind
    num_micro_batches: int
    borders: Borders


@dataclass(frozen=True, eq=False, kw_only=True)
class Laid:
    """A point with all but its simulated time.

    Attributes:
        point, placement, schedule: which.
        kinds: per kind of pipeline.
        num_fewer: pipelines that run one micro-batch fewer than their kind.
        estimate_s: of the step.
        frugal: see ``BorderProblem``.
        margin_bytes: left free on every device.
    """

    point: Point
    placement: Placement
    schedule: str
    kinds: tuple[KindPlan, ...]
    num_fewer: int
    estimate_s: float
    frugal: bool = False
    margin_bytes: float = 0.0


def placements_of(setting: Setting, point: Point) -> list[Placement]:
    """The layouts of a point that differ in what crosses machines."""
    devices = setting.devices
    shape = (point.num_stages, point.num_pipelines, point.num_deeper)
    found = [setting.place(*shape, LAYOUTS[0])]
    several = point.num_stages > 1 and point.num_pipelines > 1 and point.num_deeper == 0
    if several and point.num_pipelines <= devices.largest_machine and devices.is_uniform:
        other = setting.place(*shape, LAYOUTS[1])
        if found[0].reduces_across and not other.reduces_across:
            found.append(other)
    return found


def lay_out(
    setting: Setting,
    point: Point,
    placement: Placement,
    schedule: str,
    *,
    frugal: bool = False,
    margin_bytes: float = 0.0,
) -> Laid | None:
    """Shares and borders; None if none fit.

    Args:
        setting: what it is for.
        point: what to lay out.
        placement: one of ``placements_of``.
        schedule: its name.
        frugal: see ``BorderProblem``.
        margin_bytes: to leave free on every device.
    """
    kinds = placement.kinds
    total = setting.num_micro_batches(point.micro_batch_size)
    each_s = [1 / (float(kind.speed.min()) * kind.num_stages) for kind in kinds]
    rest_s = [(kind.num_stages - 1) * each for kind, each in zip(kinds, each_s, strict=True)]
    counts = [kind.count for kind in kinds]
    shares = share_out(total, counts, each_s, rest_s)
    plans = _plans(setting, point, placement, schedule, shares, frugal=frugal, margin_bytes=margin_bytes)
    if plans and len(plans) > 1:  # borders say more exactly how fast each kind is
        each_s = [max(plan.borders.busy_s) for plan in plans]
        rest_s = [
            plan.borders.value_s - plan.num_micro_batches * each
            for plan, each in zip(plans, each_s, strict=True)
        ]
        shares = share_out(total, counts, each_s, rest_s)
        plans = _plans(setting, point, placement, schedule, shares, frugal=frugal, margin_bytes=margin_bytes)
    if plans is None:
        return None
    return Laid(
        point=point,
        placement=placement,
        schedule=schedule,
        kinds=plans,
        num_fewer=shares.num_fewer,
        estimate_s=max(plan.borders.value_s for plan in plans) + setting.profile.step_overhead_s,
        frugal=frugal,
        margin_bytes=margin_bytes,
    )


def _plans(
    setting: Setting,
    point: Point,
    placement: Placement,
    schedule: str,
    shares: Shares,
    *,
    frugal: bool,
    margin_bytes: float,
) -> tuple[KindPlan, ...] | None:
    plans = []
    for kind, share in zip(placement.kinds, shares.most, strict=True):
        problem = border_problem(
            setting,
            point,
            placement,
            kind,
            num_micro_batches=share,
            schedule=schedule,
            frugal=frugal,
            margin_bytes=margin_bytes,
        )
        borders = BorderTable(problem, one_depth=True).borders(kind.num_stages)
        if borders is None:
            return None
        plans.append(KindPlan(kind=kind, num_micro_batches=share, borders=borders))
    return tuple(plans)


def border_problem(
    setting: Setting,
    point: Point,
    placement: Placement,
    kind: Kind,
    *,
    num_micro_batches: int,
    schedule: str,
    frugal: bool = False,
    margin_bytes: float = 0.0,
) -> BorderProblem:
    """What a table of borders is made of."""
    return BorderProblem(
        runs=setting.sections.runs(point.micro_batch_size, split=point.split),
        resident_bytes=setting.resident_bytes(point.num_pipelines),
        late_s=setting.late_s(placement, kind, point.micro_batch_size, split=point.split),
        num_micro_batches=num_micro_batches,
        schedule=schedule,
        rows=setting.rows(kind),
        task_overhead_s=setting.profile.task_overhead_s,
        slowdown=setting.slowdown(placement, kind, point.micro_batch_size),
        margin_bytes=margin_bytes,
        frugal=frugal,
    )
