"""The TCP sockets that a gloo group opened, so that it can be ended while somebody is blocked in it.

gloo's own ``abort`` and ``shutdown`` do not release a blocked receive; ``shutdown(2)`` on its sockets does,
here and on the peers. gloo does not name its sockets, so they are found as those that appear while the group
is formed. A socket that another thread opened meanwhile may be among them; connections of the store never are.
"""

from __future__ import annotations

import contextlib
import os
import socket
import stat
from collections.abc import Iterator

from torch.distributed import PrefixStore, Store, TCPStore  # type: ignore[attr-defined]


class SocketLedger:
    """Sockets opened inside ``recording``, by descriptor and inode (descriptors are used again)."""

    def __init__(self, store: Store) -> None:
        self._store_port = _port_of(store)
        self._inodes: dict[int, int] = {}

    @contextlib.contextmanager
    def recording(self) -> Iterator[None]:
        """Remember sockets that appear in this process meanwhile, even if what is done inside fails."""
        before = _socket_inodes()
        try:
            yield
        finally:
            for descriptor, inode in _socket_inodes().items():
                if before.get(descriptor) != inode and self._is_link(descriptor):
                    self._inodes[descriptor] = inode

    def shut_down(self) -> None:
        """Shut down those that are still open; whoever is blocked on them gets an error."""
        inodes, self._inodes = self._inodes, {}
        for descriptor, inode in inodes.items():
            # closed or disconnected meanwhile, or used anew for another file
            with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
                if os.fstat(duplicate.fileno()).st_ino == inode:
                    duplicate.shutdown(socket.SHUT_RDWR)

    def _is_link(self, descriptor: int) -> bool:
        """True for a TCP connection that is not the store's. Not for a listener: gloo aborts without."""
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            if duplicate.family in (socket.AF_INET, socket.AF_INET6):
                return self._store_port not in (duplicate.getsockname()[1], duplicate.getpeername()[1])
        return False


def shut_down_connections(host: str, port: int) -> None:
    """Shut down all TCP connections of this process to one address; whoever waits on one gets an error."""
    for descriptor in _socket_inodes():
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(descriptor)) as duplicate:
            is_ip = duplicate.family in (socket.AF_INET, socket.AF_INET6)
            if is_ip and _plain(duplicate.getpeername()) == (host, port):
                duplicate.shutdown(socket.SHUT_RDWR)


def _plain(name: tuple[str, int]) -> tuple[str, int]:
    """Address and port; an IPv4 address that an IPv6 socket uses as what it is."""
    return name[0].removeprefix("::ffff:"), name[1]


def _port_of(store: Store) -> int | None:
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    return int(store.port) if isinstance(store, TCPStore) else None


def _socket_inodes() -> dict[int, int]:
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the directory's own descriptor
            status = os.fstat(int(name))
            if stat.S_ISSOCK(status.st_mode):
                found[int(name)] = status.st_ino
    return found
