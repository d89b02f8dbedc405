"""What a preflight looks at: facts of one machine, as values that travel between machines as JSON."""

from __future__ import annotations

from msgspec import Struct

from varuna.versions import Versions


class Interface(Struct, frozen=True, kw_only=True):
    """A network interface and one of its addresses."""

    name: str
    address: str


class Place(Struct, frozen=True, kw_only=True):
    """Where a job writes.

    Attributes:
        what: it is for: ``cache``, ``logs``, ``checkpoints``; or ``bucket`` for checkpoints at a URL.
        path: absolute, or the URL.
        free_bytes: there; 0 of a bucket.
        problem: why nothing can be written there; empty if it can.
    """

    what: str
    path: str
    free_bytes: int = 0
    problem: str = ""


class ManagerFacts(Struct, frozen=True, kw_only=True):
    """A manager, seen from a machine.

    Attributes:
        url: where it should be.
        problem: why it cannot be asked; empty if it can.
        ahead_s: how far its clock is ahead of the machine's, within ``round_trip_s``.
        versions: of its machine; None if it cannot be asked.
    """

    url: str
    problem: str = ""
    round_trip_s: float = 0.0
    ahead_s: float = 0.0
    versions: Versions | None = None


class Reach(Struct, frozen=True, kw_only=True):
    """Whether a machine can connect to another; ``problem`` is empty if it can."""

    name: str
    address: str
    problem: str = ""


class MachineFacts(Struct, frozen=True, kw_only=True):
    """One machine.

    Attributes:
        name: what it is called.
        host_name: what it calls itself.
        name_addresses: what that name resolves to, on the machine itself.
        name_problem: why it does not resolve; empty if it does.
        name_s: what resolving took, in seconds.
        interfaces: all that are up and have an address; empty where that cannot be known.
        address: by which other machines reach this one; empty if there is none to ask about.
        listen_problem: why no port can be opened at that address; empty if one can.
        variables: those of the environment that matter here, if set.
        versions: what is installed.
        places: directories that a job writes to.
        shared_memory_bytes: free in /dev/shm; None where there is none.
        num_gpus, num_visible_gpus: in the machine, and for a job.
        unix_s: its clock, seconds since 1970.
        manager: a manager that it asked; None without one.
        reached: other machines that it has tried.
    """

    name: str
    host_name: str
    name_addresses: tuple[str, ...] = ()
    name_problem: str = ""
    name_s: float = 0.0
    interfaces: tuple[Interface, ...] = ()
    address: str = ""
    listen_problem: str = ""
    variables: dict[str, str] = {}
    versions: Versions = Versions()
    places: tuple[Place, ...] = ()
    shared_memory_bytes: int | None = None
    num_gpus: int = 0
    num_visible_gpus: int = 0
    unix_s: float = 0.0
    manager: ManagerFacts | None = None
    reached: tuple[Reach, ...] = ()
