"""Real sshd instances, each in a network namespace of its own: separate machines to ssh. Needs root."""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from tests.launch.jobs import wait_until

SSHD = shutil.which("sshd", path=f"{os.environ.get('PATH', '')}:/usr/sbin")
NETWORK = f"10.214.{os.getpid() % 254}"  # tests may run side by side
HERE = f"{NETWORK}.1"
NAMESPACES = Path("/etc/netns")


@dataclass(frozen=True)
class Machines:
    """Those that exist.

    Attributes:
        ssh: the command with which they are reached.
        addresses: theirs, by name.
        daemons: process ids of their sshd, by name.
    """

    ssh: str
    addresses: dict[str, str]
    daemons: dict[str, int]
    namespaces: dict[str, str]

    def unplug(self, name: str) -> None:
        """From now on nothing reaches it, and nobody is told."""
        _ip("netns", "exec", self.namespaces[name], "ip", "link", "set", "eth0", "down")

    def plug_in(self, name: str) -> None:
        """It is reached again."""
        _ip("netns", "exec", self.namespaces[name], "ip", "link", "set", "eth0", "up")


@contextlib.contextmanager
def machines(directory: Path, *names: str) -> Iterator[Machines]:
    """So many machines on one switch with this one."""
    assert SSHD is not None
    bridge = f"vb{os.getpid()}"
    key = directory / "key"
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-f", str(key)], check=True)
    Path("/run/sshd").mkdir(mode=0o755, exist_ok=True)
    with contextlib.ExitStack() as stack:
        _ip("link", "add", bridge, "type", "bridge")
        stack.callback(_ip, "link", "delete", bridge)
        _ip("addr", "add", f"{HERE}/24", "dev", bridge)
        _ip("link", "set", bridge, "up")
        addresses, daemons, namespaces = {}, {}, {}
        for index, name in enumerate(names):
            address = f"{NETWORK}.{10 + index}"
            namespaces[name] = _plug_in(stack, bridge, f"vm{index}x{os.getpid()}", address)
            daemons[name] = _start_sshd(stack, directory, key, namespaces[name], address)
            addresses[name] = address
        config = directory / "ssh_config"
        config.write_text(_config(addresses, key, directory))
        for address in addresses.values():
            wait_until(lambda address=address: _listens(address), 120, f"sshd at {address}")
        yield Machines(f"ssh -F {config}", addresses, daemons, namespaces)


def _plug_in(stack: contextlib.ExitStack, bridge: str, namespace: str, address: str) -> str:
    _ip("netns", "add", namespace)
    stack.callback(_ip, "netns", "delete", namespace)
    _name_as_debian_does(stack, namespace)
    outside = f"o{namespace}"[:15]
    _ip("link", "add", outside, "type", "veth", "peer", "name", "eth0", "netns", namespace)
    _ip("link", "set", outside, "master", bridge)
    _ip("link", "set", outside, "up")
    for arguments in (
        ("addr", "add", f"{address}/24", "dev", "eth0"),
        ("link", "set", "eth0", "up"),
        ("link", "set", "lo", "up"),
    ):
        _ip("netns", "exec", namespace, "ip", *arguments)
    return namespace


def _name_as_debian_does(stack: contextlib.ExitStack, namespace: str) -> None:
    """Its own name is 127.0.1.1 there: ``ip netns exec`` puts this file in the place of /etc/hosts."""
    directory = NAMESPACES / namespace
    directory.mkdir(parents=True)
    stack.callback(shutil.rmtree, directory)
    (directory / "hosts").write_text(f"127.0.0.1 localhost\n127.0.1.1 {socket.gethostname()}\n")


def _start_sshd(stack: contextlib.ExitStack, directory: Path, key: Path, namespace: str, address: str) -> int:
    assert SSHD is not None
    config = directory / f"sshd-{address}"
    config.write_text(
        f"ListenAddress {address}:22\nHostKey {key}\nAuthorizedKeysFile {key}.pub\nStrictModes no\n"
        f"UsePAM no\nPermitRootLogin prohibit-password\nPidFile none\nPrintMotd no\n"
    )
    with (directory / f"sshd-{address}.err").open("wb") as log:
        process = subprocess.Popen(
            ["ip", "netns", "exec", namespace, SSHD, "-D", "-e", "-f", str(config)],
            stderr=log,
            start_new_session=True,
        )

    def end() -> None:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()

    stack.callback(end)
    return process.pid


def _config(addresses: dict[str, str], key: Path, directory: Path) -> str:
    """Names that only ssh knows: the user's own options have to be kept."""
    hosts = "".join(f"Host {name}\n    HostName {address}\n" for name, address in addresses.items())
    return (
        f"{hosts}Host *\n    IdentityFile {key}\n    IdentitiesOnly yes\n    StrictHostKeyChecking no\n"
        f"    UserKnownHostsFile {directory}/known_hosts\n    LogLevel ERROR\n"
    )


def _listens(address: str) -> bool:
    try:
        socket.create_connection((address, 22), timeout=1).close()
    except OSError:
        return False
    return True


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
