"""Which of this machine's addresses its peers connect to.

A host name that resolves to 127.0.1.1 on its own machine (Debian's ``/etc/hosts``) makes a rank announce an
address that only it can reach. So ranks announce numeric addresses, found by asking the kernel which local
address routes to the store's host, and a rank that found loopback while others did not asks again for the
route to one of those.
"""

from __future__ import annotations

import ipaddress
import os
import socket
from collections.abc import Sequence

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from varuna.errors import ConfigError


def is_loopback(address: str) -> bool:
    """True for 127.0.0.0/8 and ::1."""
    return ipaddress.ip_address(address).is_loopback


def route_to(host: str, port: int) -> str:
    """The numeric local address from which ``host`` is reached; nothing is sent.

    Raises:
        ConfigError: the host's name does not resolve or there is no route to it.
    """
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            name: str = probe.getsockname()[0]
    except OSError as error:
        raise ConfigError(
            f"No route from this machine ({socket.gethostname()}) to {host!r} port {port}: {error}. Check "
            f"MASTER_ADDR, or name a reachable address."
        ) from error
    return name


def peer_to_ask(own_index: int, addresses: Sequence[str]) -> str | None:
    """Pure choice: whose route to use instead of the own address, or None if the own address will do.

    All loopback: one machine, fine. Own loopback while another is not: the first other one that is not.
    """
    if not is_loopback(addresses[own_index]):
        return None
    return next((address for address in addresses if not is_loopback(address)), None)


def choose_address(store: Store, rank: int, size: int, host: str, port: int) -> str:
    """This rank's numeric address for its peers; every rank calls it once, before groups are made.

    ``VARUNA_ADDRESS`` in the environment overrides the choice.

    Args:
        store: reachable by all ranks, with a prefix not used before.
        rank: this process among all.
        size: number of processes.
        host: where the store is served.
        port: where the store is served.
    """
    own = os.environ.get("VARUNA_ADDRESS") or route_to(host, port)
    if size == 1:
        return own
    shared = PrefixStore("address", store)
    shared.set(str(rank), own)
    addresses = [shared.get(str(peer)).decode() for peer in range(size)]
    peer = peer_to_ask(rank, addresses)
    return own if peer is None else route_to(peer, port)
