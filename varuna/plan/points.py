"""All layouts worth a look, as arrays, each with a lower bound of its step time and an estimate.

A *point* is P, D, m, whether backward is split, and whether left-over workers make some pipelines one stage
deeper. Bounds hold for all stage borders, schedules and placements; nothing is simulated here.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

from varuna.plan.setting import Setting
from varuna.plan.tables import Floats

Ints = NDArray[np.int64]

NEAR_SHARES = (0.6, 0.75, 0.88, 1.15, 1.35)
"""Micro-batches of neighbouring points, as shares of a point's own."""


@dataclass(frozen=True, kw_only=True)
class Point:
    """One layout without borders, schedule and placement.

    Attributes:
        num_stages, num_pipelines, micro_batch_size: P, D, m.
        num_deeper: pipelines, among the D, that have P + 1 stages.
        split: for schedules that split backward; else for the others.
        bound_s: no step takes less.
        estimate_s: what a step takes, roughly.
        least_bytes: some device needs at least so many.
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
class Points:
    """Many of them, as columns; ``fits`` is False where no device could hold a stage."""

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

    def __getitem__(self, index: int) -> Point:
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


@dataclass(frozen=True, eq=False, kw_only=True)
class _Network:
    """Seconds for reductions, at least and by layout, and by layout of messages; see the functions below."""

    least_reduce_s: Floats
    reduced_s: dict[str, Floats]
    messages_s: dict[str, tuple[Floats, Floats]]


class PointMaker:
    """Makes points for one setting."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting
        self.sizes = _start_sizes(setting)
        self._table_sizes = _doubling(self.sizes)
        self._growth: dict[bytes, Floats] = {}

    def all(self) -> Points:
        """Where a search starts.

        Every P. For each, the D that use all workers, that fit whole machines, and halves of the former. For
        each of these the measured m, and the smallest m that give no more micro-batches.
        """
        batch_size, sizes = self.setting.wish.batch_size, self.sizes
        stages, pipelines = self._shapes()
        grid = sizes[None, :] + 0 * pipelines[:, None]
        if self.setting.wish.micro_batch_size is None:
            tight = _tight(batch_size, _each(batch_size, grid, pipelines[:, None]), pipelines[:, None])
            grid = np.concatenate([grid, np.clip(tight, sizes[0], sizes[-1])], axis=1)
        shape = np.repeat(np.arange(len(stages)), grid.shape[1])
        size = grid.ravel()
        used = np.minimum(pipelines[shape], -(-batch_size // size))
        return self._joined(stages[shape], used, size, 0 * size)

    def near(self, point: Point) -> Points:
        """Sizes between those that ``all`` has, and left-over workers in deeper pipelines."""
        setting = self.setting
        wish, workers = setting.wish, setting.devices.num_workers
        pipelines = np.array([point.num_pipelines])
        sizes = np.array([point.micro_batch_size])
        if wish.micro_batch_size is None:
            each = _each(wish.batch_size, sizes, pipelines)
            more = np.maximum(1, np.rint(each * np.array(NEAR_SHARES)).astype(np.int64))
            tight = _tight(wish.batch_size, more, pipelines)
            sizes = np.concatenate([sizes, np.clip(tight, self.sizes[0], self.sizes[-1])])
        deeper = [0]
        left = workers - point.num_stages * point.num_pipelines
        if 0 < left < point.num_pipelines and point.num_stages < len(setting.profile.sections):
            deeper += [left] if wish.num_stages is None else []
        grid = np.array([(size, extra) for size in sizes.tolist() for extra in deeper], dtype=np.int64)
        used = np.minimum(point.num_pipelines, -(-wish.batch_size // grid[:, 0]))
        keep = used == point.num_pipelines
        stages = np.full(int(keep.sum()), point.num_stages)
        return self._joined(stages, used[keep], grid[keep, 0], grid[keep, 1], only=point.split)

    def _shapes(self) -> tuple[Ints, Ints]:
        """P and D."""
        devices, fixed = self.setting.devices, self.setting.wish.num_stages
        deepest = min(len(self.setting.profile.sections), devices.num_workers)
        shapes: list[tuple[int, int]] = []
        for stages in [fixed] if fixed else range(1, deepest + 1):
            count = devices.num_workers // stages
            counts = {1, devices.num_whole_groups(stages), min(count, devices.largest_machine)}
            while count:
                counts.add(count)
                count //= 2
            shapes += [(stages, count) for count in counts if count]
        columns = np.array(shapes, dtype=np.int64)
        return columns[:, 0], columns[:, 1]

    def _joined(
        self, stages: Ints, pipelines: Ints, sizes: Ints, deeper: Ints, *, only: bool | None = None
    ) -> Points:
        """Without repeats; for both kinds of schedule, or for ``only`` one."""
        keys = (stages, pipelines, sizes, deeper)
        limits = tuple(int(key.max()) + 1 for key in keys)
        distinct = np.unravel_index(np.unique(np.ravel_multi_index(keys, limits)), limits)
        stages, pipelines, sizes, deeper = (key.astype(np.int64) for key in distinct)
        network = self._network(stages, pipelines, sizes)
        parts = [
            self._bounded(stages, pipelines, sizes, deeper, network=network, split=split)
            for split in (False, True)
            if self.setting.wish.schedules_of(split=split) and only in (None, split)
        ]
        names = (field.name for field in fields(Points))
        return Points(**{name: np.concatenate([getattr(part, name) for part in parts]) for name in names})

    def _network(self, stages: Ints, pipelines: Ints, size: Ints) -> _Network:
        """What messages and reductions take, whatever the schedule."""
        least_reduce_s, reduced_s = self._reductions(stages, pipelines)
        messages = {layout: self._messages(stages, pipelines, size, layout) for layout in reduced_s}
        return _Network(least_reduce_s=least_reduce_s, reduced_s=reduced_s, messages_s=messages)

    def _bounded(
        self, stages: Ints, pipelines: Ints, size: Ints, deeper: Ints, *, network: _Network, split: bool
    ) -> Points:
        setting = self.setting
        profile, sections, devices = setting.profile, setting.sections, setting.devices
        residents, overhead_s = setting.residents, profile.task_overhead_s
        sizes, which = np.unique(size, return_inverse=True)
        forward_s, backward_s = (
            sections.totals(name, sizes.astype(np.float64))[which] for name in ("forward_s", "backward_s")
        )
        speed = np.sort(devices.speed)[::-1]
        work_s = forward_s + backward_s
        num = setting.wish.batch_size / size  # micro-batches; a short one counts as less than one
        each = np.ceil(np.ceil(num) / pipelines)
        each = np.where((deeper > 0) | (pipelines == 1), num / (pipelines + deeper / stages), each)
        passing_s = work_s / speed[0] + 2 * stages * overhead_s
        depths = np.stack([stages, stages + 1], axis=1)
        busiest_s, mean_s = (
            table[which[:, None], depths] / speed[0] + 2 * overhead_s
            for table in self._slowest_stage(sizes, split=split)
        )
        busy_s = _shared_out(num, each, busiest_s, pipelines, deeper)
        even_s = num * work_s / np.cumsum(speed)[stages * pipelines + deeper - 1]
        share = sections.least_forward_share if split else 1.0
        fill_s = passing_s * share / -np.expm1(stages * np.log1p(-share / np.maximum(each, share + 1e-9)))
        update_s = float(residents.update_s[0, -1]) / stages / speed[0]
        last_s = (each * work_s - backward_s) / stages / speed[0] + network.least_reduce_s
        resident = float(residents.alone_bytes[0, -1]) - profile.runtime_bytes
        least_bytes = profile.runtime_bytes + resident / (stages + (deeper > 0))
        fits = (least_bytes <= devices.memory_bytes.max()) & np.isfinite(busy_s)
        later = np.maximum(1e-9, 1 - 1 / np.maximum(each, 1))  # micro-batches after the first
        bound_s = np.max([even_s + update_s, fill_s, last_s + update_s, busy_s], axis=0)
        estimate_s = np.full(len(size), np.inf)
        for layout, reduce_s in network.reduced_s.items():
            messages_s, sending_s = network.messages_s[layout]
            slowest_s = np.maximum(mean_s, sending_s[:, None])
            expected_s = _shared_out(num, each, slowest_s, pipelines, deeper) * later
            estimate_s = np.minimum(estimate_s, expected_s + passing_s + messages_s + reduce_s + update_s)
        estimate_s[~fits] = np.inf
        return Points(
            num_stages=stages,
            num_pipelines=pipelines,
            micro_batch_size=size,
            num_deeper=deeper,
            split=np.full(len(size), split),
            bound_s=bound_s + profile.step_overhead_s,
            estimate_s=estimate_s + profile.step_overhead_s,
            least_bytes=least_bytes,
            fits=fits,
        )

    def _slowest_stage(self, sizes: Ints, *, split: bool) -> tuple[Floats, Floats]:
        """``[sizes, S + 2]``: how slow the slowest of P stages is on the profile's device: bound and estimate.

        Forward, backward and, where memory needs it, recompute; infinite where nothing fits. One table of
        borders, for all P, for some of the sizes, see ``_doubling``. At a size in between, every section takes
        at least as much longer as the one that grows least, and needs no less memory: the bound; the estimate
        is linear.
        """
        base = self._table_sizes
        slowest = self._slowest_of(split=split)
        below = np.searchsorted(base, sizes, side="right") - 1
        growth = self._growth_of(sizes, base[below])
        bound = growth[:, None] * slowest[below]
        above = np.minimum(below + 1, len(base) - 1)
        share = ((sizes - base[below]) / np.maximum(1, base[above] - base[below]))[:, None]
        with np.errstate(invalid="ignore"):
            between = slowest[below] + share * (slowest[above] - slowest[below])
        return bound, np.where(np.isfinite(between), np.maximum(between, bound), bound)

    def _growth_of(self, sizes: Ints, smaller: Ints) -> Floats:
        """``[sizes]``: least ratio, over sections, of seconds at one size to those at a smaller one."""
        key = sizes.tobytes()
        if key not in self._growth:
            sections, growth = self.setting.sections, np.full(len(sizes), np.inf)
            for names in (("forward_s", "backward_s"), ("recompute_s",)):
                at, before = (
                    np.sum([sections.each(name, each) for name in names], axis=0) for each in (sizes, smaller)
                )
                ratio = np.divide(at, before, out=np.full_like(at, np.inf), where=before > 0)
                growth = np.minimum(growth, ratio.min(axis=1))
            growth[np.isinf(growth)] = 1.0  # nothing takes any time
            self._growth[key] = growth
        return self._growth[key]

    def _slowest_of(self, *, split: bool) -> Floats:
        """``[table sizes, S + 2]``: seconds of the slowest of P stages."""
        setting = self.setting
        count, fixed = len(setting.profile.sections), setting.wish.num_stages
        depth = min(count, (min(count, setting.devices.num_workers) if fixed is None else fixed) + 1)
        recompute = setting.wish.recompute
        known = setting.tables.slowest_s(
            self._table_sizes,
            depth,
            split=split,
            memory_bytes=float(setting.devices.memory_bytes.max()),
            recompute=None if isinstance(recompute, tuple) else recompute,
        )
        slowest = np.full((len(self._table_sizes), count + 2), np.inf)
        slowest[:, : depth + 1] = known[:, : depth + 1]
        slowest[:, -1] = slowest[:, -2]
        return slowest

    def _messages(self, stages: Ints, pipelines: Ints, size: Ints, layout: str) -> tuple[Floats, Floats]:
        """Seconds of the messages of one micro-batch, one after the other, and that the busiest link has it."""
        profile, most = self.setting.profile, self.setting.devices.largest_machine
        num_bytes = self.setting.sections.totals("output_bytes", size.astype(np.float64))
        num_bytes /= max(1, len(profile.sections) - 1)
        beside = np.ones_like(pipelines) if layout == "pipelines" else np.minimum(pipelines, most)
        across = -(-stages // np.maximum(1, most // beside)) - 1  # messages that leave a machine, each way
        (within_s, within_send_s), (across_s, across_send_s) = (
            (link.latency_s + sum(link.jitter_s) / max(1, len(link.jitter_s)), num_bytes / link.bytes_per_s)
            for link in (profile.within_machine, profile.across_machines)
        )
        streams = np.minimum(2, across) * beside
        shared_s = across_send_s * np.maximum(1.0, streams * self.setting.link_share)
        messages_s = across * (across_s + across_send_s) + (stages - 1 - across) * (within_s + within_send_s)
        return 2 * messages_s, np.where(across > 0, shared_s, np.where(stages > 1, within_send_s, 0.0))

    def _reductions(self, stages: Ints, pipelines: Ints) -> tuple[Floats, dict[str, Floats]]:
        """Seconds to reduce an even share of the gradients: at least, and by layout (``placement``)."""
        setting = self.setting
        devices, share = setting.devices, float(setting.residents.gradient_bytes[0, -1]) / stages
        inside_s, across_s = np.zeros(len(stages)), np.zeros(len(stages))
        for count in np.unique(pipelines).tolist():
            chosen = pipelines == count
            inside_s[chosen] = setting.residents.buckets_s(share[chosen], count, False)
            across_s[chosen] = setting.residents.buckets_s(share[chosen], count, True)
        slowdowns = [
            np.maximum(1.0, np.minimum(stages, size) * setting.link_share)
            for size in (devices.smallest_machine, devices.largest_machine)
        ]
        fits = pipelines <= devices.largest_machine
        apart = np.where(stages * pipelines <= devices.largest_machine, inside_s, across_s * slowdowns[1])
        return np.where(fits, inside_s, across_s * slowdowns[0]), {
            "pipelines": apart,
            "replicas": np.where(fits, inside_s, across_s * slowdowns[1]),
        }


def _start_sizes(setting: Setting) -> Ints:
    """Micro-batch sizes to start from: the measured ones, and halves of the smallest down to 1."""
    wish = setting.wish
    if wish.micro_batch_size is not None:
        return np.array([wish.micro_batch_size], dtype=np.int64)
    sizes = {int(size) for size in setting.sections.sizes if size <= wish.batch_size}
    small = min(int(setting.sections.sizes[0]), wish.batch_size)
    while small:
        sizes.add(small)
        small //= 2
    return np.array(sorted(sizes), dtype=np.int64)


def _doubling(sizes: Ints) -> Ints:
    """Some of the sizes, from the first on, each at least twice the one before."""
    chosen = [int(sizes[0])]
    for size in sizes.tolist():
        if size >= 2 * chosen[-1]:
            chosen.append(size)
    return np.array(chosen, dtype=np.int64)


def _each(batch_size: int, sizes: Ints, pipelines: Ints) -> Ints:
    """Micro-batches of the pipeline that has most."""
    num = -(-batch_size // sizes)
    return -(-num // np.minimum(pipelines, num))


def _tight(batch_size: int, num: Ints, pipelines: Ints) -> Ints:
    """The smallest size that gives each pipeline at most ``num`` micro-batches."""
    return -(-batch_size // (num * pipelines))


def _shared_out(num: Floats, each: Floats, slowest_s: Floats, pipelines: Ints, deeper: Ints) -> Floats:
    """Seconds in which the slowest stages of all pipelines, working at the same time, get through the batch.

    ``slowest_s`` is ``[points, 2]``: of pipelines of P stages, and of deeper ones.
    """
    with np.errstate(all="ignore"):
        rates = (pipelines - deeper) / slowest_s[:, 0] + deeper / slowest_s[:, 1]
        return np.where(deeper > 0, num / rates, each * slowest_s[:, 0])
