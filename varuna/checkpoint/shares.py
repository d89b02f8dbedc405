"""Which holder writes which tensor, and who takes over when one dies. Pure, the same answer on every worker.

Workers that hold the same sections form a group and divide the group's tensors among them. What a group's
members must know to agree is only what all of them hold, so no message is needed.
"""

from __future__ import annotations

import zlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

Worker = int


@dataclass(frozen=True, kw_only=True)
class Share:
    """What one worker does in a save.

    Attributes:
        write: names it writes.
        keep: names it copies besides, to write them if their writer dies before the save is committed.
    """

    write: tuple[str, ...] = ()
    keep: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Reassigned:
    """Who writes what a dead worker owed.

    Attributes:
        write: names by worker.
        lost: names that nobody alive has kept; if there are any, the save must be given up.
    """

    write: Mapping[Worker, tuple[str, ...]]
    lost: tuple[str, ...]


def shares(sizes: Mapping[str, int], holders: Sequence[Worker], *, num_copies: int = 2) -> dict[Worker, Share]:
    """Divide tensors among workers that all hold all of them, evenly by bytes.

    Largest first, each to the worker with the least so far; so no two differ by more than the largest tensor.

    Args:
        sizes: bytes by name; names of size 0 are dealt out too.
        holders: the workers.
        num_copies: how many workers copy each tensor in line: the writer and those that could take over.
    """
    workers = sorted(set(holders))
    write: dict[Worker, list[str]] = {worker: [] for worker in workers}
    keep: dict[Worker, list[str]] = {worker: [] for worker in workers}
    load = dict.fromkeys(workers, 0)
    kept_load = dict.fromkeys(workers, 0)
    for name in sorted(sizes, key=lambda name: (-sizes[name], name)):
        writer = min(workers, key=lambda worker: (load[worker], worker))
        write[writer].append(name)
        load[writer] += sizes[name]
        others = sorted(
            (worker for worker in workers if worker != writer),
            key=lambda worker: (kept_load[worker], worker),
        )
        for worker in others[: num_copies - 1]:
            keep[worker].append(name)
            kept_load[worker] += sizes[name]
    return {worker: Share(write=tuple(write[worker]), keep=tuple(keep[worker])) for worker in workers}


def planned_shares(
    worker: Worker,
    sizes: Mapping[int, Mapping[str, int]],
    holders: Mapping[int, Sequence[Worker]],
    *,
    num_copies: int = 2,
) -> dict[Worker, Share]:
    """A worker's share, and those of the workers it shares sections with as far as these sections go.

    Args:
        worker: who asks.
        sizes: per section it holds: bytes by tensor name.
        holders: per section: the workers that hold it.
        num_copies: see ``shares``.
    """
    groups: dict[tuple[Worker, ...], dict[str, int]] = {}
    for section_index in sorted(sizes):
        members = tuple(sorted(set(holders[section_index])))
        assert worker in members, (worker, section_index, members)
        groups.setdefault(members, {}).update(sizes[section_index])
    planned = {worker: Share()}
    for members, group_sizes in groups.items():
        for member, share in shares(group_sizes, members, num_copies=num_copies).items():
            before = planned.get(member, Share())
            planned[member] = Share(write=before.write + share.write, keep=before.keep + share.keep)
    return planned


def reassign(
    planned: Mapping[Worker, Share], alive: Collection[Worker], done: Collection[str] = ()
) -> Reassigned:
    """Who writes what dead workers have not.

    Any survivor can ask with the shares it knows: the answer about a name depends only on who wrote and kept
    it.

    Args:
        planned: shares of the save.
        alive: the workers that are left.
        done: names in parts that are durable, whoever wrote them.
    """
    write: dict[Worker, list[str]] = {}
    lost: list[str] = []
    for dead in sorted(set(planned) - set(alive)):
        for name in planned[dead].write:
            if name in done:
                continue
            keepers = [worker for worker in sorted(alive) if worker in planned and name in planned[worker].keep]
            if keepers:
                heir = keepers[zlib.crc32(name.encode()) % len(keepers)]
                write.setdefault(heir, []).append(name)
            else:
                lost.append(name)
    return Reassigned(write={worker: tuple(names) for worker, names in write.items()}, lost=tuple(lost))


def owners(section_names: Sequence[Sequence[str]]) -> dict[str, int]:
    """Every name to the first section that has it: where a tensor that several sections use is stored."""
    owner: dict[str, int] = {}
    for section_index, names in enumerate(section_names):
        for name in names:
            owner.setdefault(name, section_index)
    return owner
