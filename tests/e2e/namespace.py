"""A network namespace with a cable to it: whoever lives there can be cut off, as a machine can. Needs root."""

from __future__ import annotations

import contextlib
import ctypes
import os
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

OUTSIDE, INSIDE = "10.213.77.1", "10.213.77.2"
_CLONE_NEWNET = 0x40000000


@dataclass(frozen=True)
class Namespace:
    """One that exists; addresses of the two ends of its cable are ``OUTSIDE`` and ``INSIDE``."""

    name: str

    def unplug(self) -> None:
        """From now on nothing goes through, and nobody is told."""
        _ip("netns", "exec", self.name, "ip", "link", "set", f"{self.name}i", "down")


@contextlib.contextmanager
def namespace() -> Iterator[Namespace]:
    """Exists while the block runs."""
    name = f"vr{os.getpid()}"
    _ip("netns", "add", name)
    try:
        _ip("link", "add", f"{name}o", "type", "veth", "peer", "name", f"{name}i", "netns", name)
        _ip("addr", "add", f"{OUTSIDE}/30", "dev", f"{name}o")
        _ip("link", "set", f"{name}o", "up")
        for arguments in (
            ("addr", "add", f"{INSIDE}/30", "dev", f"{name}i"),
            ("link", "set", f"{name}i", "up"),
        ):
            _ip("netns", "exec", name, "ip", *arguments)
        _ip("netns", "exec", name, "ip", "link", "set", "lo", "up")
        yield Namespace(name)
    finally:
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
