"""Looks at this machine for a preflight. Decides nothing: ``findings.py`` does."""

from __future__ import annotations

import errno
import shutil
import socket
import struct
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from varuna.checkpoint.store import check_url, missing_package, shown_url
from varuna.config import cache_dir
from varuna.errors import ConfigError
from varuna.launch.devices import visible_gpus
from varuna.launch.preflight.facts import Interface, MachineFacts, ManagerFacts, Place, Reach
from varuna.morph.client import RunClient
from varuna.morph.client import check_url as host_in_url
from varuna.morph.runs import RunInfo
from varuna.versions import installed_versions

VARIABLES = (
    "VARUNA_ADDRESS",
    "GLOO_SOCKET_IFNAME",
    "NCCL_SOCKET_IFNAME",
    "NCCL_IB_DISABLE",
    "CUDA_VISIBLE_DEVICES",
)
_SHARED_MEMORY = Path("/dev/shm")
_IPV6_TABLE = Path("/proc/net/if_inet6")
_ADDRESS_OF_INTERFACE = 0x8915  # SIOCGIFADDR, linux/sockios.h
_ANY_PORT = 9  # nothing is sent
_CONNECT_S = 5.0
_NUM_ASKED = 3  # the first answer of a manager may be slow


def gather_facts(
    name: str,
    environ: Mapping[str, str],
    *,
    checkpoint_url: str = "",
    facing: str = "",
    manager: tuple[str, str] | None = None,
) -> MachineFacts:
    """Facts of this machine.

    Args:
        name: what it is called; empty for its host name.
        environ: of the job.
        checkpoint_url: where checkpoints go; empty for nowhere.
        facing: a host on the way to which others are; empty if there is none, or it is the manager's.
        manager: URL and token of one to ask; None for none.
    """
    host_name = socket.gethostname()
    name_addresses, name_problem, name_s = _resolve(host_name)
    if manager is not None and not facing:
        facing = host_in_url(manager[0])
    address = environ.get("VARUNA_ADDRESS") or (address_towards(facing) if facing else "")
    return MachineFacts(
        name=name or host_name,
        host_name=host_name,
        name_addresses=name_addresses,
        name_problem=name_problem,
        name_s=name_s,
        interfaces=interfaces(),
        address=address,
        listen_problem=_listen_problem(address),
        variables={variable: environ[variable] for variable in VARIABLES if variable in environ},
        versions=installed_versions(),
        places=places(environ, checkpoint_url),
        shared_memory_bytes=_shared_memory(),
        num_gpus=visible_gpus({key: value for key, value in environ.items() if key != "CUDA_VISIBLE_DEVICES"}),
        num_visible_gpus=visible_gpus(environ),
        manager=None if manager is None else ask_manager(*manager),
        unix_s=time.time(),
    )


def places(environ: Mapping[str, str], checkpoint_url: str) -> tuple[Place, ...]:
    """Directories here that a job with these variables writes to."""
    try:
        cache = look_at("cache", cache_dir(environ))
    except ConfigError as error:
        cache = Place(what="cache", path="", problem=str(error))
    temporary = look_at("logs", Path(environ.get("TMPDIR") or tempfile.gettempdir()))
    if not checkpoint_url:
        return cache, temporary
    if "://" not in checkpoint_url:
        return cache, temporary, look_at("checkpoints", Path(checkpoint_url).absolute())
    try:
        check_url(checkpoint_url)
        problem = missing_package(checkpoint_url)
    except ConfigError as error:
        problem = str(error)
    return cache, temporary, Place(what="bucket", path=shown_url(checkpoint_url), problem=problem)


def look_at(what: str, path: Path) -> Place:
    """A directory, or the nearest one above it that exists; a file is made there and removed again."""
    there = path
    while not there.exists() and there != there.parent:
        there = there.parent
    try:
        free_bytes = shutil.disk_usage(there).free
        with tempfile.TemporaryFile(dir=there) as file:
            file.write(b"varuna doctor")
    except OSError as error:
        return Place(what=what, path=str(path), problem=f"{error.strerror or error} in {there}")
    return Place(what=what, path=str(path), free_bytes=free_bytes)


def address_towards(host: str) -> str:
    """This machine's address on the way to a host; empty if there is no way. Nothing is sent."""
    try:
        family, kind, _, _, target = socket.getaddrinfo(host, _ANY_PORT, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)
            return str(probe.getsockname()[0])
    except OSError:
        return ""


def interfaces() -> tuple[Interface, ...]:
    """Network interfaces with an address, on Linux; elsewhere none."""
    if sys.platform != "linux":
        return ()
    import fcntl

    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = struct.pack("256s", name.encode()[:15])
            try:
                answer = fcntl.ioctl(probe.fileno(), _ADDRESS_OF_INTERFACE, request)
            except OSError:  # it has no IPv4 address
                continue
            found.append(Interface(name=name, address=socket.inet_ntoa(answer[20:24])))
    table = _IPV6_TABLE.read_text() if _IPV6_TABLE.exists() else ""
    for line in table.splitlines():
        digits, *_, name = line.split()
        address = socket.inet_ntop(socket.AF_INET6, bytes.fromhex(digits))
        found.append(Interface(name=name, address=address))
    return tuple(found)


def ask_manager(url: str, token: str) -> ManagerFacts:
    """What a manager answers, and how its clock stands, by the quickest of a few answers."""
    client = RunClient(RunInfo(run_id="", url=url.rstrip("/"), token=token, pid=0, started_s=0.0))
    answers = [_ask_once(client, url)]
    while len(answers) < _NUM_ASKED and not answers[0].problem:
        answers.append(_ask_once(client, url))
    return min(answers, key=lambda answer: (bool(answer.problem), answer.round_trip_s))


def _ask_once(client: RunClient, url: str) -> ManagerFacts:
    asked_s, began_s = time.time(), time.monotonic()
    try:
        about = client.about()
    except ConfigError as error:
        return ManagerFacts(url=url, problem=str(error))
    round_trip_s = time.monotonic() - began_s
    ahead_s = about.unix_s - (asked_s + round_trip_s / 2)
    return ManagerFacts(url=url, round_trip_s=round_trip_s, ahead_s=ahead_s, versions=about.versions)


def reach(others: Sequence[Reach]) -> tuple[Reach, ...]:
    """Connect to others, whose ``address`` is ``HOST PORT``; what came of it."""
    found = []
    for other in others:
        host, _, port = other.address.partition(" ")
        problem = ""
        try:
            socket.create_connection((host, int(port)), timeout=_CONNECT_S).close()
        except OSError as error:
            problem = str(error)
        found.append(Reach(name=other.name, address=host, problem=problem))
    return tuple(found)


def _resolve(host_name: str) -> tuple[tuple[str, ...], str, float]:
    began_s = time.monotonic()
    try:
        found = socket.getaddrinfo(host_name, None, type=socket.SOCK_STREAM)
    except OSError as error:
        return (), str(error), time.monotonic() - began_s
    addresses = dict.fromkeys(str(entry[4][0]) for entry in found)
    return tuple(addresses), "", time.monotonic() - began_s


def _listen_problem(address: str) -> str:
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    try:
        socket.create_server((address or "127.0.0.1", 0), family=family).close()
    except OSError as error:
        if error.errno == errno.EADDRNOTAVAIL:
            return "no interface of this machine has that address"
        return str(error)
    return ""


def _shared_memory() -> int | None:
    try:
        return shutil.disk_usage(_SHARED_MEMORY).free
    except OSError:
        return None
