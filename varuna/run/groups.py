"""The process groups of one generation: raw gloo or NCCL objects, no global default group.

Groups are made over store keys that start with the generation's number, which is never used twice, so nothing
of an earlier generation is taken for the present. Ending a generation closes its sockets and deletes its keys;
the next can be made in the same process.

Only a group's members make it, in the order of their rank tuples; so two workers never wait for each other.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Iterable, Sequence
from datetime import timedelta
from typing import cast

import torch
import torch.distributed as dist
from torch.distributed import Backend, PrefixStore, ProcessGroupGloo, Store  # type: ignore[attr-defined]

from varuna.aside import start_aside
from varuna.errors import ConfigError, PeerLost
from varuna.run.group import Group
from varuna.run.pending import Pending
from varuna.run.sockets import SocketLedger
from varuna.run.world import World, connect, store_is_served

__all__ = ["Group", "Groups", "Pending", "World", "connect", "store_is_served"]


_NUM_CONNECTS = 5
"""How often gloo tries to connect to a peer; each may take as long as the group's timeout says."""

HERE_TIMEOUT_S = 10.0
"""How long members that have all been seen may take to connect to one another."""


class Groups:
    """The process groups of one generation.

    Args:
        world: this worker.
        generation: number of the generation, never used before with this store.
        backend: ``"gloo"``, ``"nccl"`` or ``"auto"``: NCCL for groups whose members have a CUDA device each,
            gloo otherwise (CUDA tensors are then staged through pinned host memory by gloo itself).
        timeout_s: seconds after which a collective that makes no progress fails.
        forming_timeout_s: seconds that the members of a group, all of them at work, may take to connect.
    """

    def __init__(
        self,
        world: World,
        generation: int = 0,
        *,
        backend: str = "auto",
        timeout_s: float = 300.0,
        forming_timeout_s: float = 300.0,
    ) -> None:
        if backend not in ("auto", "gloo", "nccl"):
            raise ConfigError(f"backend={backend!r} is not known. Choose one of 'auto', 'gloo', 'nccl'.")
        self.world = world
        self.generation = generation
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._forming_timeout = timedelta(seconds=forming_timeout_s)
        self._is_closed = False
        self._groups: dict[tuple[int, ...], Group] = {}
        self._devices: tuple[str, ...] | None = None
        self._store = PrefixStore(f"generation-{generation}", world.store)
        self._sockets = SocketLedger(world.store)

    @property
    def all(self) -> Group:
        """All workers, spares included."""
        return self.of(range(self.world.size))

    def prepare(self, memberships: Iterable[Sequence[int]]) -> None:
        """Make all groups of a plan that this worker is in. Every worker passes the same memberships.

        They are made in one order everywhere, so this never deadlocks; ``of`` alone may, if two workers first
        ask for two common groups in opposite order.
        """
        for ranks in sorted({tuple(sorted(set(ranks))) for ranks in memberships}):
            if self.world.rank in ranks:
                self.of(ranks)

    def of(self, ranks: Iterable[int]) -> Group:
        """The group of these ranks, made on first use by its members (all of them must ask for it).

        Raises:
            PeerLost: it could not be formed, or another thread has closed the generation: nothing is formed
                then, for the others may be gone.
        """
        members = tuple(sorted(set(ranks)))
        self._refuse_if_closed()
        group = self._groups.get(members)
        if group is None:
            group = self._groups[members] = self._make(members)
            if self._is_closed:  # by another thread, meanwhile
                self.close()
                self._refuse_if_closed()
        return group

    def everybody_is_here(self) -> None:
        """All members have been seen: who forms a group with one that does not come gives up soon."""
        self._forming_timeout = min(self._forming_timeout, timedelta(seconds=HERE_TIMEOUT_S))

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: Iterable[int] | None = None) -> None:
        """Sum over ``ranks`` (default: all workers) in place."""
        (self.all if ranks is None else self.of(ranks)).all_reduce_sum(tensor)

    def close(self, *, in_order: bool = True) -> None:
        """End the generation's groups: sockets and threads closed, its keys deleted (by rank 0). Idempotent.

        Whoever is blocked in one, here or on a peer, gets ``PeerLost`` at once, from whatever thread this is
        called.

        Args:
            in_order: nothing is under way. False: the store may not answer any more, so keys stay; and a group
                that has lost a message ends no sooner than its timeout, so this does not wait for their ends.
        """
        self._is_closed = True
        groups, self._groups = self._groups, {}
        self._sockets.shut_down()
        process_groups = [group.close() for group in groups.values()]
        if in_order:
            _end(process_groups)
        else:
            start_aside(lambda: _end(process_groups), "varuna-end-groups")
        if in_order and self.world.size > 1 and groups and self.world.rank == 0:
            with contextlib.suppress(RuntimeError):  # the store went first; nobody reads these keys again
                for key in self._store.list_keys():
                    self._store.delete_key(key)

    def _refuse_if_closed(self) -> None:
        if self._is_closed:
            raise PeerLost(
                f"Generation {self.generation} was closed while worker {self.world.rank} was at work in it."
            )

    def _make(self, members: tuple[int, ...]) -> Group:
        world = self.world
        if world.rank not in members or not all(0 <= rank < world.size for rank in members):
            raise AssertionError(f"worker {world.rank} of {world.size} asked for the group of {members}")
        if len(members) == 1:
            return Group(members, world.rank, None, torch.device("cpu"))
        name = "-".join(map(str, members)) if len(members) < world.size else "all"
        store = PrefixStore(name, self._store)
        store.set_timeout(self._forming_timeout)
        rank = members.index(world.rank)
        try:
            if self._uses_nccl(members):
                return Group(members, world.rank, self._nccl(store, rank, len(members)), world.device)
            with self._sockets.recording():
                return Group(members, world.rank, self._gloo(store, rank, len(members)), torch.device("cpu"))
        except RuntimeError as error:
            raise PeerLost(
                f"Worker {world.rank} could not form the group of workers {list(members)} in generation "
                f"{self.generation} from address {world.address}: {error}"
            ) from error

    def _gloo(self, store: Store, rank: int, size: int) -> Backend:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        create = ProcessGroupGloo.create_device
        where = {"interface": interface} if interface else {"hostname": self.world.address}
        device = create(**where, lazy_init=False)
        options._devices = [device]
        patience = self._forming_timeout / _NUM_CONNECTS  # a peer may die when it is about to connect
        options._timeout = min(self._timeout, patience)
        options._threads = 1
        group = cast(Backend, ProcessGroupGloo(store, rank, size, options))
        group._set_default_timeout(self._timeout)  # type: ignore[attr-defined]
        return group

    def _nccl(self, store: Store, rank: int, size: int) -> Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        return cast(Backend, dist.ProcessGroupNCCL(store, rank, size, options))

    def _uses_nccl(self, members: tuple[int, ...]) -> bool:
        if self._backend == "gloo" or self.world.device.type != "cuda":
            return False
        if not dist.is_nccl_available():
            return False
        names = self._device_names()
        return self._backend == "nccl" or len({names[rank] for rank in members}) == len(members)

    def _device_names(self) -> tuple[str, ...]:
        """One name per rank, equal for ranks that share a device; told through the store once."""
        if self._devices is None:
            store = PrefixStore("device", self._store)
            uuid = torch.cuda.get_device_properties(self.world.device).uuid
            store.set(str(self.world.rank), f"{socket.gethostname()}/{uuid}")
            self._devices = tuple(store.get(str(rank)).decode() for rank in range(self.world.size))
        return self._devices


def _end(process_groups: list[Backend | None]) -> None:
    """Close them and wait for their threads."""
    while process_groups:
        process_group = process_groups.pop()
        if process_group is not None:
            process_group.shutdown()  # type: ignore[attr-defined]
