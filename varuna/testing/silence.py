"""Connections that go dead without a word, as if a cable were cut: what a process cannot tell from patience.

For Linux, without privileges: a filter on each socket drops whatever arrives, acknowledgements too, and pacing
holds back what is sent. Connections that are made afterwards work, as when the cable is plugged in again.
"""

from __future__ import annotations

import ctypes
import os
import socket
import struct

_SO_ATTACH_FILTER = 26
_SO_MAX_PACING_RATE = 47
_DROP_ALL = struct.pack("HBBI", 0x06, 0, 0, 0)  # BPF_RET | BPF_K: keep 0 bytes


def silence_connections() -> int:
    """Let all TCP connections of this process go dead; returns how many there were."""
    num_silenced = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            stream = socket.socket(fileno=os.dup(int(name)))
        except OSError:  # no socket, or closed meanwhile
            continue
        with stream:
            if stream.family in (socket.AF_INET, socket.AF_INET6) and stream.type == socket.SOCK_STREAM:
                _silence(stream)
                num_silenced += 1
    return num_silenced


def _silence(stream: socket.socket) -> None:
    program = ctypes.create_string_buffer(_DROP_ALL, len(_DROP_ALL))
    stream.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, struct.pack("I", 1))
    stream.setsockopt(
        socket.SOL_SOCKET, _SO_ATTACH_FILTER, struct.pack("HxxxxxxP", 1, ctypes.addressof(program))
    )
