"""Process groups of one generation: raw gloo or NCCL objects, no global default group.

``connect`` reaches the store that all workers share, ``World`` says who this worker is, ``Groups`` makes
and ends the groups of one generation. Groups are made over store keys that start with the generation's
number, which is never used twice, so nothing of an earlier generation is taken for the present. Ending a
generation closes its sockets and deletes its keys; the next can be made in the same process.

Only a group's members make it, in the order of their rank tuples; so two workers never wait for each other.
"""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from varuna.errors import ConfigError, PeerLost

JsonValue = Any
"""What ``json.dumps`` takes: None, bool, int, float, str, lists and string-keyed dicts of these."""


@dataclass(frozen=True, kw_only=True)
class World:
    """Who this worker is: one process, one device.

    Attributes:
        rank, size: this worker among all, spares included.
        local_rank: this worker among those of its machine.
        store: shared by all workers of the run, already prefixed with the run's id.
        device: where this worker's parameters and tensors live.
        address: this worker's numeric address for its peers (``varuna.run.address``).
    """

    rank: int
    size: int
    store: dist.Store
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    address: str = "127.0.0.1"


def store_is_served(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the launcher serves the store (torchrun's agent, or ``VARUNA_STORE_SERVED=1``), so rank 0 need not."""
    return (
        "1" in environ.get("VARUNA_STORE_SERVED", "") or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    )


def connect(
    rank: int,
    size: int,
    master_addr: str,
    master_port: int,
    prefix: str,
    timeout_s: float,
    *,
    listen_fd: int | None = None,
) -> dist.Store:
    """The store that all workers share, under ``prefix`` (unique to the run).

    One worker needs no network and gets a store in memory. Otherwise rank 0 serves it, on the address given
    (loopback stays loopback), unless the launcher does (``store_is_served``).

    Args:
        rank, size: this worker among all.
        master_addr, master_port: where the store is served.
        prefix: put before every key.
        timeout_s: seconds until a wait for a missing key or worker fails.
        listen_fd: rank 0 only: a listening socket to serve on, e.g. one bound to port 0 before the workers
            were forked; it is closed with the store.

    Raises:
        PeerLost: the store was not reached within ``timeout_s``.
        ConfigError: rank 0 cannot listen there.
    """
    if size == 1:
        return dist.PrefixStore(prefix, dist.HashStore())
    serves = rank == 0 and not store_is_served()
    if serves and listen_fd is None:
        listen_fd = _listen(master_addr, master_port)
    try:
        store = dist.TCPStore(
            master_addr,
            master_port,
            is_master=serves,
            timeout=timedelta(seconds=timeout_s),
            wait_for_workers=False,
            master_listen_fd=listen_fd if serves else None,
        )
    except RuntimeError as error:  # DistNetworkError and friends
        raise PeerLost(
            f"Worker {rank} of {size} did not reach the store at {master_addr}:{master_port} within "
            f"{timeout_s:g} s: {error}. Is worker 0 running, and is that address reachable from here?"
        ) from error
    return dist.PrefixStore(prefix, store)


def _listen(host: str, port: int) -> int:
    try:
        return socket.create_server((host, port), backlog=2048, reuse_port=False).detach()
    except OSError as error:
        raise ConfigError(
            f"Worker 0 cannot serve the store at {host}:{port}: {error}. MASTER_ADDR must be an address of "
            f"worker 0's machine and MASTER_PORT a free port there."
        ) from error


class Pending:
    """A collective under way; keep it until ``wait`` has returned."""

    def __init__(self, work: dist.Work | None, what: str) -> None:
        self._work = work
        self._what = what

    def wait(self) -> None:
        """Block until done (CUDA: until the current stream waits for it). ``PeerLost`` if it failed."""
        work, self._work = self._work, None
        if work is None:
            return
        try:
            work.wait()
        except RuntimeError as error:
            raise PeerLost(f"{self._what} failed: {error}") from error


class Group:
    """Some workers that talk to one another. ``ranks`` are ranks of the world, ascending.

    With one member every operation is a no-op on the spot. An error means that the whole group is dead.
    """

    def __init__(
        self, ranks: tuple[int, ...], rank: int, process_group: dist.Backend | None, device: torch.device
    ) -> None:
        self.ranks = ranks
        self.process_group = process_group
        self._rank = rank
        self._device = device

    @property
    def size(self) -> int:
        """Number of members."""
        return len(self.ranks)

    def start_all_reduce_sum(self, tensor: torch.Tensor) -> Pending:
        """Begin to replace ``tensor`` (contiguous, same size and dtype on all) by the sum over members."""
        if self.process_group is None:
            return Pending(None, "")
        return self._start("all-reduce", lambda group: group.allreduce([tensor]))

    def all_reduce_sum(self, tensor: torch.Tensor) -> None:
        """Replace ``tensor`` by the sum over members: bit-equal on all of them."""
        self.start_all_reduce_sum(tensor).wait()

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        """Replace ``tensor`` by that of world rank ``source``."""
        if self.process_group is None:
            return
        root = self.ranks.index(source)
        options = dist.BroadcastOptions()
        options.rootRank = root
        options.rootTensor = 0
        self._start("broadcast", lambda group: group.broadcast([tensor], options)).wait()

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send to world rank ``to``; it returns when the peer has received. Contiguous tensors only."""
        peer = self.ranks.index(to)
        self._start(f"send to worker {to}", lambda group: group.send([tensor], peer, 0)).wait()

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Fill ``tensor`` (same size and dtype as sent) from world rank ``source``."""
        peer = self.ranks.index(source)
        self._start(f"receive from worker {source}", lambda group: group.recv([tensor], peer, 0)).wait()

    def all_gather_bytes(self, data: bytes) -> list[bytes]:
        """Every member's bytes, in the order of ``ranks``; lengths may differ."""
        if self.process_group is None:
            return [data]
        lengths = self._place(torch.zeros(self.size, dtype=torch.int64))
        own = self.ranks.index(self._rank)
        lengths[own] = len(data)
        self.all_reduce_sum(lengths)
        sizes = [int(length) for length in lengths.tolist()]
        width = max(*sizes, 1)
        mine = torch.zeros(width, dtype=torch.uint8)
        if data:
            mine[: len(data)] = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        mine = self._place(mine)
        rows = [torch.empty_like(mine) for _ in self.ranks]
        self._start("all-gather", lambda group: group.allgather([rows], [mine])).wait()
        return [bytes(row.cpu().numpy()[:size]) for row, size in zip(rows, sizes, strict=True)]

    def all_gather_json(self, value: JsonValue) -> list[JsonValue]:
        """Every member's value, in the order of ``ranks``, as JSON (tuples become lists)."""
        return [json.loads(data) for data in self.all_gather_bytes(json.dumps(value).encode())]

    def barrier(self) -> None:
        """Return when every member has called it."""
        self.all_reduce_sum(self._place(torch.zeros(1)))

    def _place(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(self._device)

    def _start(self, what: str, call: Any) -> Pending:
        what = f"Worker {self._rank}: {what} among workers {list(self.ranks)}"
        try:
            return Pending(call(self.process_group), what)
        except RuntimeError as error:
            raise PeerLost(f"{what} failed: {error}") from error


class Groups:
    """The process groups of one generation.

    Args:
        world: this worker.
        generation: number of the generation, never used before with this store.
        backend: ``"gloo"``, ``"nccl"`` or ``"auto"``: NCCL for groups whose members have a CUDA device each,
            gloo otherwise (CUDA tensors are then staged through pinned host memory by gloo itself).
        timeout_s: seconds after which a collective that makes no progress fails.
    """

    def __init__(
        self, world: World, generation: int = 0, *, backend: str = "auto", timeout_s: float = 300.0
    ) -> None:
        if backend not in ("auto", "gloo", "nccl"):
            raise ConfigError(f"backend={backend!r} is not known. Choose one of 'auto', 'gloo', 'nccl'.")
        self.world = world
        self.generation = generation
        self._backend = backend
        self._timeout = timedelta(seconds=timeout_s)
        self._groups: dict[tuple[int, ...], Group] = {}
        self._devices: tuple[str, ...] | None = None
        self._store = dist.PrefixStore(f"generation-{generation}", world.store)

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
        """The group of these ranks, made on first use by its members (all of them must ask for it)."""
        members = tuple(sorted(set(ranks)))
        if members not in self._groups:
            self._groups[members] = self._make(members)
        return self._groups[members]

    def all_reduce_sum(self, tensor: torch.Tensor, ranks: Iterable[int] | None = None) -> None:
        """Sum over ``ranks`` (default: all workers) in place."""
        (self.all if ranks is None else self.of(ranks)).all_reduce_sum(tensor)

    def close(self) -> None:
        """End the generation's groups: sockets and threads closed, its keys deleted (by rank 0). Idempotent.

        Call it on every worker when no collective is under way.
        """
        groups, self._groups = self._groups, {}
        for group in groups.values():
            process_group, group.process_group = group.process_group, None
            if process_group is not None and hasattr(process_group, "shutdown"):
                process_group.shutdown()
        if self.world.size > 1 and groups and self.world.rank == 0:
            for key in self._store.list_keys():
                self._store.delete_key(key)

    def _make(self, members: tuple[int, ...]) -> Group:
        world = self.world
        if world.rank not in members or not all(0 <= rank < world.size for rank in members):
            raise AssertionError(f"worker {world.rank} of {world.size} asked for the group of {members}")
        if len(members) == 1:
            return Group(members, world.rank, None, torch.device("cpu"))
        name = "-".join(map(str, members)) if len(members) < world.size else "all"
        store = dist.PrefixStore(name, self._store)
        store.set_timeout(self._timeout)
        rank = members.index(world.rank)
        try:
            if self._uses_nccl(members):
                return Group(members, world.rank, self._nccl(store, rank, len(members)), world.device)
            return Group(members, world.rank, self._gloo(store, rank, len(members)), torch.device("cpu"))
        except RuntimeError as error:
            raise PeerLost(
                f"Worker {world.rank} could not form the group of workers {list(members)} in generation "
                f"{self.generation} from address {world.address}: {error}"
            ) from error

    def _gloo(self, store: dist.Store, rank: int, size: int) -> dist.Backend:
        options = dist.ProcessGroupGloo._Options()
        interface = os.environ.get("GLOO_SOCKET_IFNAME", "").split(",")[0]
        create = dist.ProcessGroupGloo.create_device
        device = create(interface=interface) if interface else create(hostname=self.world.address)
        options._devices = [device]
        options._timeout = self._timeout
        options._threads = 1
        return dist.ProcessGroupGloo(store, rank, size, options)

    def _nccl(self, store: dist.Store, rank: int, size: int) -> dist.Backend:
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout
        group: dist.Backend = dist.ProcessGroupNCCL(store, rank, size, options)
        return group

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
            store = dist.PrefixStore("device", self._store)
            uuid = torch.cuda.get_device_properties(self.world.device).uuid
            store.set(str(self.world.rank), f"{socket.gethostname()}/{uuid}")
            self._devices = tuple(store.get(str(rank)).decode() for rank in range(self.world.size))
        return self._devices
