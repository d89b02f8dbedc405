"""A network namespace with a cable to it: whoever lives there can be cut off, as a machine can. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Namespace:
    """One that exists, or whose name is known.

    Attributes:
        name: of it.
        outside, inside: addresses of the two ends of its cable.
    """

    name: str

    @property
    def outside(self) -> str:
        return f"{self._network}.1"

    @property
    def inside(self) -> str:
        return f"{self._network}.2"

    @property
    def _network(self) -> str:
        return f"10.213.{int(self.name[2:]) % 254}"

    def unplug(self) -> None:
        """From now on nothing goes through, and nobody is told."""
        _ip("netns", "exec", self.name, "ip", "link", "set", f"{self.name}i", "down")


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """Exists while the block runs."""
    name = f"vr{os.getpid()}"
    made = Namespace(name)
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"{name}o", "type", "veth", "peer", "name", f"{name}i", "netns", name)
        _ip("addr", "add", f"{made.outside}/30", "dev", f"{name}o")
        _ip("link", "set", f"{name}o", "up")
        for arguments in (
            ("addr", "add", f"{made.inside}/30", "dev", f"{name}i"),
            ("link", "set", f"{name}i", "up"),
        ):
            _ip("netns", "exec", name, "ip", *arguments)
        _ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        yield made
    finally:
        subprocess.run(["ip", "link", "delete", f"{name}o"], check=False)  # whoever still lives there keeps it
        _ip("netns", "delete", name)


def enter(name: str) -> None:
    """This process lives there from now on; it must have one thread and no connections."""
    descriptor = os.open(Path("/run/netns") / name, os.O_RDONLY)
    try:
        if ctypes.CDLL(None, use_errno=True).setns(descriptor, _CLONE_NEWNET):
            raise OSError(ctypes.get_errno(), "setns")
    finally:
        os.close(descriptor)


def _ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True)
