"""Where the members of a generation meet: a store that one of them serves.

Every worker that waits for its next generation offers one (``StoreOffer``) and says where it is; the offer of
whoever gets rank 0 is taken, the others are dropped. So a store lives in a member, and as long as its
generation: nothing of an earlier generation is in it, nothing has to be deleted from it, and it adds nothing
that could be lost on its own, for a generation that loses a member is over anyway.

The store in which the first generation meets is the launcher's; once that generation is over nobody needs it.
"""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Iterator
from datetime import timedelta

from torch.distributed import DistError, HashStore, Store, TCPStore  # type: ignore[attr-defined]

from varuna.errors import PeerLost, ProtocolError
from varuna.generations import Formation, FormingTimes
from varuna.run.sockets import shut_down_connections
from varuna.spec import Plan

_BACKLOG = 1024
_CONNECT_S = 5.0
_ANSWER_S = 10.0
"""How long the store may take to accept a connection, and to answer: it serves before anybody hears of it."""


class StoreOffer:
    """A store that this worker serves, in case it gets rank 0 in its next generation.

    Args:
        host: this worker's numeric address for its peers.

    Attributes:
        address: ``host:port``.
        store: the server, and a connection to it; it serves until nobody refers to it.
    """

    def __init__(self, host: str) -> None:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=_BACKLOG)
        port: int = listener.getsockname()[1]
        self.address = f"{host}:{port}"
        self.store: Store = TCPStore(
            host,
            port,
            is_master=True,
            wait_for_workers=False,
            master_listen_fd=listener.detach(),
            timeout=timedelta(seconds=_ANSWER_S),
        )


class Meeting:
    """One member's way to the store of the next generation. Another thread may ``abort`` it meanwhile.

    Args:
        formation: of that generation.
        offer: what this worker offered.

    Attributes:
        index, plan, pause, forming_times: as of the generation.
    """

    def __init__(self, formation: Formation, offer: StoreOffer | None) -> None:
        self.index = formation.generation
        self.plan: Plan = formation.plan
        self.pause = False
        self.forming_times = FormingTimes()
        self._formation = formation
        self._offer = offer
        self._reason = ""

    def connect(self) -> Store:
        """The store.

        Raises:
            PeerLost: whoever serves it is gone, or this meeting was aborted.
            ProtocolError: nobody was named who serves it.
        """
        formation = self._formation
        offer, self._offer = self._offer, None  # one that is not taken ends here
        if formation.size == 1:
            return HashStore()
        if not formation.store_address:
            raise ProtocolError(f"Generation {self.index} has {formation.size} members and no store.")
        if offer is not None and offer.address == formation.store_address:
            return offer.store
        host, port = _split(formation.store_address)
        try:
            with socket.create_connection((host, port), timeout=_CONNECT_S):
                pass  # refused at once if it is gone; torch's own attempts would go on for a while
            store = TCPStore(
                host, port, is_master=False, wait_for_workers=False, timeout=timedelta(seconds=_ANSWER_S)
            )
        except (OSError, RuntimeError) as error:
            raise PeerLost(
                f"Worker 0 of generation {self.index} does not answer at {formation.store_address}: "
                f"{self._reason or error}."
            ) from error
        if self._reason:  # given by another thread, before there was a connection to shut down
            raise PeerLost(f"Gave up meeting the others of generation {self.index}: {self._reason}.")
        return store

    def abort(self, reason: str) -> None:
        """End ``connect`` soon, from any thread."""
        self._reason = reason or "aborted"
        self.hang_up()

    def hang_up(self) -> None:
        """End every wait here for an answer of the store, from any thread; it cannot be used any more."""
        if self._formation.store_address:
            shut_down_connections(*_split(self._formation.store_address))


@contextlib.contextmanager
def store_as_peer() -> Iterator[None]:
    """A store that is gone means the same as a peer that is gone: ``PeerLost``."""
    try:
        yield
    except DistError as error:
        raise PeerLost(f"The store in which workers meet cannot be reached any more: {error}.") from error


def _split(address: str) -> tuple[str, int]:
    host, _, port = address.rpartition(":")
    return host, int(port)
