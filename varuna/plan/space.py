"""All layouts worth a look, as arrays, each with a lower bound of its step time and an estimate.

A *point* is P, D, m, and whether left-over workers make some pipelines one stage deeper. Bounds hold for all stage
borders, schedules and placements; nothing is simulated here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from varuna.plan.borders import ANY, ANY_SPLIT, MANY, SPLIT, BorderProblem, BorderTable, Row
from varuna.plan.costs import all_reduce_s
from varuna.plan.memory import BUCKET_BYTES
from varuna.plan.placement import Devices
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.tables import Floats, Residents, SectionTable

Ints = NDArray[np.int64]

_FREE_LINK = LinkProfile(latency_s=0.0, bytes_per_s=float("inf"))


@dataclass(frozen=True, kw_only=True)
class Point:
    """One layout without borders, schedule and placement.

    Attributes:
        num_stages, num_pipelines, micro_batch_size: P, D, m.
        num_deeper: pipelines, among the D, that have P + 1 stages.
        split: for schedules that split backward; else for the others.
        bound_s: no step takes less.
        estimate_s: what a step takes if sections could be divided at will.
        least_bytes: what some device needs at least; it fits if that is not above the largest memory.
    """

    num_stages: int
    num_pipelines: int
    micro_batch_size: int
    num_deeper: int
    split: bool
    bound_s: float
    estimate_s: float
    least_bytes: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Space:
    """Points as columns; ``fits`` where ``least_bytes`` is not above the largest device's memory."""

    num_stages: Ints
    num_pipelines: Ints
    micro_batch_size: Ints
    num_deeper: Ints
    split: NDArray[np.bool_]
    bound_s: Floats
    estimate_s: Floats
    least_bytes: Floats
    fits: NDArray[np.bool_]

    def __len__(self) -> int:
        return len(self.bound_s)

    def point(self, index: int) -> Point:
        """One of them."""
        return Point(
            num_stages=int(self.num_stages[index]),
            num_pipelines=int(self.num_pipelines[index]),
            micro_batch_size=int(self.micro_batch_size[index]),
            num_deeper=int(self.num_deeper[index]),
            split=bool(self.split[index]),
            bound_s=float(self.bound_s[index]),
            estimate_s=float(self.estimate_s[index]),
            least_bytes=float(self.least_bytes[index]),
        )


@dataclass(frozen=True, kw_only=True)
class Wish:
    """What is asked for, and what the user fixed (None: free)."""

    batch_size: int
    num_stages: int | None
    micro_batch_size: int | None
    schedules: tuple[str, ...]
    recompute: bool | tuple[bool, ...] | None

    def schedules_of(self, *, split: bool) -> tuple[str, ...]:
        """Those with or without a split backward."""
        return tuple(name for name in self.schedules if (name in SPLIT) == split)


def make_space(
    profile: Profile, sections: SectionTable, residents: Residents, devices: Devices, wish: Wish
) -> Space:
    """Every P; for each the D that use all workers, fit whole machines, or are halves of that; for each of these
    the measured m, and the smallest m that give as many micro-batches.
    """
    stages, pipelines, deeper = _shapes(len(profile.sections), devices, wish.num_stages)
    base = _sizes(sections, wish)
    sizes = base[None, :] + 0 * pipelines[:, None]
    if wish.micro_batch_size is None:
        num = _each(wish.batch_size, sizes, pipelines[:, None])
        sizes = np.concatenate([sizes, _tight(wish.batch_size, num, pipelines[:, None])], axis=1)
        sizes = np.clip(sizes, base[0], base[-1])
    grid = np.broadcast_to(np.arange(len(stages))[:, None], sizes.shape)
    shape, size = grid.ravel(), sizes.ravel()
    used = np.minimum(pipelines[shape], -(-wish.batch_size // size))
    alive = (deeper[shape] == 0) | (used == pipelines[shape])
    keys = np.stack([stages[shape], used, size, deeper[shape]])[:, alive]
    keys = np.unique(keys, axis=1)
    parts = [
        _bounded(profile, sections, residents, devices, wish, keys, split=split)
        for split in (False, True)
        if wish.schedules_of(split=split)
    ]
    columns = (field.name for field in fields(Space))
    return Space(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in columns})


def _shapes(num_sections: int, devices: Devices, num_stages: int | None) -> tuple[Ints, Ints, Ints]:
    """P, D, and how many of the D are one stage deeper."""
    shapes: list[tuple[int, int, int]] = []
    workers = devices.num_workers
    for stages in [num_stages] if num_stages else range(1, min(num_sections, workers) + 1):
        most = workers // stages
        counts = {1, devices.num_whole_groups(stages), min(most, devices.largest_machine)}
        count = most
        while count:
            counts.add(count)
            count //= 2
        shapes += [(stages, count, 0) for count in counts if count]
        left = workers - most * stages
        if 0 < left < most and stages < num_sections and not num_stages:
            shapes.append((stages, most, left))
    columns = np.array(shapes, dtype=np.int64).T
    return columns[0], columns[1], columns[2]


def _sizes(sections: SectionTable, wish: Wish) -> Ints:
    """Micro-batch sizes to start from: the measured ones, and halves of the smallest down to 1."""
    if wish.micro_batch_size is not None:
        return np.array([wish.micro_batch_size], dtype=np.int64)
    sizes = {int(size) for size in sections.sizes if size <= wish.batch_size}
    small = min(int(sections.sizes[0]), wish.batch_size)
    while small:
        sizes.add(small)
        small //= 2
    return np.array(sorted(sizes), dtype=np.int64)


def _each(batch_size: int, sizes: Ints, pipelines: Ints) -> Ints:
    """Micro-batches of the pipeline that has most."""
    num = -(-batch_size // sizes)
    return -(-num // np.minimum(pipelines, num))


def _tight(batch_size: int, num: Ints, pipelines: Ints) -> Ints:
    """The smallest size that gives each pipeline at most ``num`` micro-batches."""
    return -(-batch_size // (num * pipelines))


def _bounded(
    profile: Profile,
    sections: SectionTable,
    residents: Residents,
    devices: Devices,
    wish: Wish,
    keys: Ints,
    *,
    split: bool,
) -> Space:
    stages, pipelines, size, deeper = keys
    sizes, which = np.unique(size, return_inverse=True)
    forward_s, backward_s = (
        sections.totals(name, sizes.astype(np.float64))[which] for name in ("forward_s", "backward_s")
    )
    speed = np.sort(devices.speed)[::-1]
    fastest, overhead_s = float(speed[0]), profile.task_overhead_s
    work_s = forward_s + backward_s
    num = wish.batch_size / size  # micro-batches; a short one counts as less than one
    each = np.ceil(np.ceil(num) / pipelines)
    each = np.where((deeper > 0) | (pipelines == 1), num / (pipelines + deeper / stages), each)
    passing_s = work_s / fastest + 2 * stages * overhead_s
    busy_s, expected_s = (
        _shared(num, each, table[which] / fastest + 2 * overhead_s, stages, pipelines, deeper)
        for table in _slowest_stage(profile, sections, residents, devices, wish, sizes, split)
    )
    link = profile.across_machines
    share_of_link = link.bytes_per_s / link.shared_bytes_per_s if link.shared_bytes_per_s else 0.0
    even_s = num * work_s / np.cumsum(speed)[stages * pipelines + deeper - 1]
    share = _least_forward_share(sections) if split else 1.0
    fill_s = passing_s * share / -np.expm1(stages * np.log1p(-share / np.maximum(each, share + 1e-9)))
    reduce_s = _reductions(profile, residents, devices, stages, pipelines)
    least_reduce_s, reduce_s = (
        reduce_s * np.where(pipelines > devices.largest_machine, np.maximum(1.0, factor * share_of_link), 1.0)
        for factor in (
            np.minimum(stages, devices.smallest_machine),
            np.minimum(stages, devices.largest_machine),
        )
    )
    update_s = float(residents.update_s[0, -1]) / stages / fastest
    last_s = ((each * work_s - backward_s) / stages) / fastest + least_reduce_s
    rest_s = profile.step_overhead_s
    first_s = passing_s + 2 * (stages - 1) * _message_s(profile, sections, devices, stages, size)
    resident = float(residents.alone_bytes[0, -1]) - profile.runtime_bytes
    least_bytes = profile.runtime_bytes + resident / (stages + (deeper > 0))
    fits = (least_bytes <= devices.memory_bytes.max()) & np.isfinite(busy_s)
    expected_s[~fits] = np.inf
    fill_share = 1 - 1 / np.maximum(each, 1)  # of the slowest stage's time, what is not in ``first_s``
    fill_share = np.maximum(fill_share, 1e-9)
    return Space(
        num_stages=stages,
        num_pipelines=pipelines,
        micro_batch_size=size,
        num_deeper=deeper,
        split=np.full(len(size), split),
        bound_s=np.max([even_s + update_s, fill_s, last_s + update_s, busy_s], axis=0) + rest_s,
        estimate_s=expected_s * fill_share + first_s + reduce_s + update_s + rest_s,
        least_bytes=least_bytes,
        fits=fits,
    )


def _shared(
    num: Floats, each: Floats, slowest_s: Floats, stages: Ints, pipelines: Ints, deeper: Ints
) -> Floats:
    """Seconds in which the slowest stages of all pipelines, working at the same time, get through the batch."""
    rows = np.arange(len(stages))
    with np.errstate(all="ignore"):
        rates = (pipelines - deeper) / slowest_s[rows, stages] + deeper / slowest_s[rows, stages + 1]
        return np.where(deeper > 0, num / rates, each * slowest_s[rows, stages])


def _slowest_stage(
    profile: Profile,
    sections: SectionTable,
    residents: Residents,
    devices: Devices,
    wish: Wish,
    sizes: Ints,
    split: bool,
) -> tuple[Floats, Floats]:
    """``[sizes, S + 2]``: how slow the slowest of P stages is on the profile's device: a bound, and an estimate.

    Forward, backward and, where memory needs it, recompute; infinite where nothing fits. One table of borders,
    for all P, for each size that the search starts from. At a size in between, every section takes at least as
    much longer as the one that grows least, and needs no less memory: the bound; the estimate is linear.
    """
    count = len(profile.sections)
    base = _sizes(sections, wish)
    nothing = np.zeros((count + 1, count + 1))
    recompute = wish.recompute
    flags = recompute[::-1] if isinstance(recompute, tuple) else (recompute,) * count
    slowest = np.full((len(base), count + 2), np.inf)
    for index, size in enumerate(base.tolist()):
        problem = BorderProblem(
            runs=sections.runs(size),
            resident_bytes=residents.alone_bytes,
            late_s=nothing,
            num_micro_batches=MANY,
            schedule=ANY_SPLIT if split else ANY,
            rows=[
                Row(memory_bytes=float(devices.memory_bytes.max()), link=_FREE_LINK, recompute=flag)
                for flag in flags
            ],
        )
        table = BorderTable(problem, tail_weight=0.0)
        slowest[index, 1 : len(flags) + 1] = table.values_s()[1:] / MANY
    slowest[:, -1] = slowest[:, -2]
    below = np.searchsorted(base, sizes, side="right") - 1
    growth = np.full(len(sizes), np.inf)
    for names in (("forward_s", "backward_s"), ("recompute_s",)):
        at = sum(sections.each(name, sizes) for name in names)
        before = sum(sections.each(name, base[below]) for name in names)
        ratio = np.divide(at, before, out=np.full_like(at, np.inf), where=before > 0)
        growth = np.minimum(growth, ratio.min(axis=1))
    bound = growth[:, None] * slowest[below]
    above = np.minimum(below + 1, len(base) - 1)
    share = ((sizes - base[below]) / np.maximum(1, base[above] - base[below]))[:, None]
    with np.errstate(invalid="ignore"):
        between = slowest[below] + share * (slowest[above] - slowest[below])
    return bound, np.where(np.isfinite(between), np.maximum(between, bound), bound)


def _message_s(profile: Profile, sections: SectionTable, devices: Devices, stages: Ints, size: Ints) -> Floats:
    """Seconds of a mean message between stages: inside a machine if a pipeline fits one."""
    seconds = np.zeros(len(stages))
    num_cuts = max(1, len(profile.sections) - 1)
    num_bytes = sections.totals("output_bytes", size.astype(np.float64)) / num_cuts
    for link, chosen in (
        (profile.within_machine, stages <= devices.largest_machine),
        (profile.across_machines, stages > devices.largest_machine),
    ):
        delay_s = link.latency_s + (float(np.mean(link.jitter_s)) if link.jitter_s else 0.0)
        seconds[chosen] = delay_s + num_bytes[chosen] / link.bytes_per_s
    return seconds


def _least_forward_share(sections: SectionTable) -> float:
    """The least share that forward has in a section's forward and backward."""
    forward_s, backward_s = sections.values["forward_s"], sections.values["backward_s"]
    both = forward_s + backward_s
    return float(np.min(np.divide(forward_s, both, out=np.ones_like(both), where=both > 0)))


def _reductions(
    profile: Profile, residents: Residents, devices: Devices, stages: Ints, pipelines: Ints
) -> Floats:
    """Seconds to reduce an even share of the gradients."""
    pairs, which = np.unique(np.stack([stages, pipelines]), axis=1, return_inverse=True)
    total = float(residents.gradient_bytes[0, -1])
    seconds = []
    for depth, count in pairs.T.tolist():
        buckets = max(1.0, total / depth / BUCKET_BYTES)
        across = count > devices.largest_machine
        seconds.append(buckets * all_reduce_s(profile, count, total / depth / buckets, across))
    return np.array(seconds)[which.ravel()]
