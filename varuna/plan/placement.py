"""Workers to pipelines and stages, so that heavy links stay inside machines.

Two layouts, compared by what a step costs with each:

- ``pipelines``: the stages of a pipeline on one machine where it has room, so that activations stay inside; the
  replicas of a stage, which sum gradients, are on different machines.
- ``replicas``: the replicas of a stage on one machine; activations go across.

Machines are taken fastest first, then by memory and size. Groups (pipelines, or the replicas of a stage) that
fit a machine whole are placed first; what is left over on the machines forms further groups in the same order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from varuna.errors import PlanError
from varuna.plan.cluster import Cluster

LAYOUTS = ("pipelines", "replicas")

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]


class Devices:
    """The workers of a cluster as arrays, and the order in which they are given out."""

    def __init__(self, cluster: Cluster, memory_bytes: int) -> None:
        """``memory_bytes`` holds where a machine does not state its own."""
        machines = cluster.machines
        if any(machine.speed <= 0 for machine in machines):
            slow = next(machine for machine in machines if machine.speed <= 0)
            raise PlanError(
                f"Machine {slow.name} has speed {slow.speed}. Speeds must be above 0; 1 is the profile's."
            )
        counts = np.array([machine.num_workers for machine in machines], dtype=np.int64)
        self.num_workers = int(counts.sum())
        self.machine = np.repeat(np.arange(len(machines)), counts)
        self.speed = np.repeat(np.array([machine.speed for machine in machines]), counts)
        memory = np.array([machine.memory_bytes or memory_bytes for machine in machines], dtype=np.float64)
        self.memory_bytes = np.repeat(memory, counts)
        self.machine_size = np.repeat(counts, counts)
        within = np.arange(self.num_workers) - np.repeat(np.cumsum(counts) - counts, counts)
        self.order = np.lexsort((within, self.machine, -self.machine_size, -self.memory_bytes, -self.speed))
        self.within = within
        self.largest_machine, self.smallest_machine = int(counts.max()), int(counts.min())
        self._sizes = counts
        self._whole_groups: dict[int, int] = {}
        self.is_uniform = len(set(self.speed.tolist())) <= 1 and len(set(self.memory_bytes.tolist())) <= 1

    def by_groups(self, group_size: int) -> Ints:
        """Workers in an order whose runs of ``group_size`` lie on one machine as far as they can."""
        inside = self.within < self.machine_size // group_size * group_size
        ordered_inside = inside[self.order]
        return np.concatenate((self.order[ordered_inside], self.order[~ordered_inside]))

    def num_whole_groups(self, group_size: int) -> int:
        """How many groups fit on one machine each."""
        if group_size not in self._whole_groups:
            self._whole_groups[group_size] = int((self._sizes // group_size).sum())
        return self._whole_groups[group_size]


@dataclass(frozen=True, eq=False, kw_only=True)
class Kind:
    """Pipelines that are alike for planning: same devices, same links.

    Attributes:
        workers: ``[count, P]``.
        speed, memory_bytes: ``[P]`` of the devices, stage by stage.
        crosses: ``[P]``: whether the link from a stage to the next goes to another machine; False for the last.
            Of the pipeline that crosses most; ``crossing`` is ``[count, P]`` of all.
        representative: index of that pipeline among ``workers``.
    """

    workers: Ints
    crossing: NDArray[np.bool_]
    representative: int
    speed: Floats
    memory_bytes: Floats
    crosses: NDArray[np.bool_]

    @property
    def count(self) -> int:
        """Pipelines of this kind."""
        return len(self.workers)

    @property
    def num_stages(self) -> int:
        """P."""
        return int(self.workers.shape[1])


@dataclass(frozen=True, eq=False, kw_only=True)
class Placement:
    """Who is where.

    Attributes:
        layout: one of ``LAYOUTS``.
        kinds: pipelines, grouped; at least one.
        reduces_across: whether replicas of a stage are on more than one machine.
        groups_per_machine: most stages that have replicas on one machine.
        streams_per_machine: most links between stages over which one machine sends to others.
    """

    layout: str
    kinds: tuple[Kind, ...]
    reduces_across: bool
    groups_per_machine: int
    streams_per_machine: int

    @cached_property
    def num_pipelines(self) -> int:
        """D."""
        return sum(kind.count for kind in self.kinds)


def place(
    devices: Devices, depths: Sequence[int], counts: Sequence[int], layout: str = "pipelines"
) -> Placement:
    """``counts[i]`` pipelines of ``depths[i]`` stages each. Workers that are left over are in no kind.

    ``replicas`` takes one depth.
    """
    needed = sum(depth * count for depth, count in zip(depths, counts, strict=True))
    assert needed <= devices.num_workers, f"{needed} workers of {devices.num_workers}"
    if layout == "replicas":
        (depth,), (count,) = depths, counts
        grid = devices.by_groups(count)[: depth * count].reshape(depth, count).T
        return _placement(devices, layout, [grid])
    grids = []
    order = devices.by_groups(depths[0])
    start = 0
    for depth, count in zip(depths, counts, strict=True):
        grids.append(order[start : start + depth * count].reshape(count, depth))
        start += depth * count
    return _placement(devices, layout, grids)


def _placement(devices: Devices, layout: str, grids: Sequence[Ints]) -> Placement:
    kinds = [kind for grid in grids for kind in _kinds(devices, np.ascontiguousarray(grid))]
    if len(grids) == 1:
        machine = devices.machine[grids[0]]
        across = bool((machine != machine[:1]).any())
    else:
        across = True
    deepest = max(grid.shape[1] for grid in grids)
    held = np.zeros((int(devices.machine[-1]) + 1, deepest), dtype=bool)
    for grid in grids:
        held[devices.machine[grid], np.arange(grid.shape[1])] = True
    streams = np.zeros(len(held))
    for kind in kinds:
        for sends in (kind.crossing, np.roll(kind.crossing, 1, axis=1)):
            streams += np.bincount(devices.machine[kind.workers[sends]], minlength=len(streams))
    return Placement(
        layout=layout,
        kinds=tuple(kinds),
        reduces_across=across,
        groups_per_machine=int(held.sum(axis=1).max()),
        streams_per_machine=int(streams.max()),
    )


def _kinds(devices: Devices, grid: Ints) -> list[Kind]:
    """Pipelines with the same speeds and memories, as one kind: with the links of the one that crosses most.

    Which of several boundaries a pipeline crosses machines at makes little difference to its time; the
    prediction of the plan that is chosen distinguishes them.
    """
    machine = devices.machine[grid]
    crosses = np.zeros(grid.shape, dtype=bool)
    crosses[:, :-1] = machine[:, 1:] != machine[:, :-1]
    speed, memory = devices.speed[grid], devices.memory_bytes[grid]
    if devices.is_uniform:
        groups = [np.arange(len(grid))]
    else:
        keys: dict[bytes, list[int]] = {}
        for index in range(len(grid)):
            keys.setdefault(speed[index].tobytes() + memory[index].tobytes(), []).append(index)
        groups = [np.array(indices) for indices in keys.values()]
    kinds = []
    for group in groups:
        worst = group[int(np.argmax(crosses[group].sum(axis=1)))]
        kinds.append(
            Kind(
                workers=grid[group],
                crossing=crosses[group],
                representative=int(np.flatnonzero(group == worst)[0]),
                speed=speed[worst],
                memory_bytes=memory[worst],
                crosses=crosses[worst],
            )
        )
    return kinds
