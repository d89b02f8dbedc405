"""Who this worker is, and the store that all workers of a run share."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import timedelta

import torch
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from varuna.errors import ConfigError, PeerLost


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
    store: Store
    local_rank: int = 0
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))
    address: str = "127.0.0.1"


def store_is_served(environ: Mapping[str, str] = os.environ) -> bool:
    """True if the launcher serves the store: torchrun's agent, or whoever set ``VARUNA_STORE_SERVED=1``."""
    return environ.get("VARUNA_STORE_SERVED") == "1" or environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def connect(
    rank: int,
    size: int,
    master_addr: str,
    master_port: int,
    *,
    prefix: str,
    timeout_s: float,
    listen_fd: int | None = None,
    is_served: bool | None = None,
) -> Store:
    """The store that all workers share, under ``prefix`` (unique to the run).

    One worker needs no network and gets a store in memory. Otherwise rank 0 serves it, on the address given
    (loopback stays loopback), unless the launcher does.

    Args:
        rank: this worker among all.
        size: number of workers.
        master_addr: where the store is served.
        master_port: where the store is served.
        prefix: put before every key.
        timeout_s: seconds until a wait for a missing key or worker fails.
        listen_fd: rank 0 only: a listening socket to serve on, e.g. one bound to port 0 before the workers
            were forked; it is closed with the store.
        is_served: whether the launcher serves the store; None asks ``store_is_served``.

    Raises:
        PeerLost: the store was not reached within ``timeout_s``.
        ConfigError: rank 0 cannot listen there.
    """
    if size == 1:
        return PrefixStore(prefix, HashStore())
    serves = rank == 0 and not (store_is_served() if is_served is None else is_served)
    if serves and listen_fd is None:
        listen_fd = _listen(master_addr, master_port)
    try:
        store = TCPStore(
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
    return PrefixStore(prefix, store)


def _listen(host: str, port: int) -> int:
    try:
        return socket.create_server((host, port), backlog=2048, reuse_port=False).detach()
    except OSError as error:
        raise ConfigError(
            f"Worker 0 cannot serve the store at {host}:{port}: {error}. MASTER_ADDR must be an address of "
            f"worker 0's machine and MASTER_PORT a free port there."
        ) from error
