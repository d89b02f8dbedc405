"""Connections that go dead without a word, as if a cable were cut: what a process cannot tell from patience.

For Linux, without privileges: a filter on each socket drops whatever arrives, acknowledgements too, and pacing
holds back what is sent: of that a little comes through, ever more seldom, as the kernel sends it again.
Connections that are made afterwards work, as when the cable is plugged in again.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import socket
import stat
import struct

_SO_ATTACH_FILTER = 26
_SO_MAX_PACING_RATE = 47
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes


def silence_connections() -> int:
    """Let all TCP connections of this process go dead; returns how many there were."""
    num_silenced = 0
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # closed meanwhile
            if not stat.S_ISSOCK(os.fstat(int(name)).st_mode):
                continue
            with socket.socket(fileno=os.dup(int(name))) as stream:
                num_silenced += _silence(stream)
    return num_silenced


def _silence(stream: socket.socket) -> bool:
    """Whether it was a TCP connection, which is dead now."""
    if stream.family not in (socket.AF_INET, socket.AF_INET6) or stream.type != socket.SOCK_STREAM:
        return False
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    stream.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", 1))
    stream.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    )
    return True
