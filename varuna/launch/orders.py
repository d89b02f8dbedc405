"""What a launcher on another machine says to the agent that it started: over the agent's standard input.

First one line of JSON (``Header``): nothing secret, and nothing that a shell could misread, is ever on a
command line. Then words, a line each. The end of the stream means that the launcher, or the way to it, is gone.
"""

from __future__ import annotations

import os
from typing import Literal

import msgspec

from varuna.errors import ConfigError

Word = Literal["leave", "stop", "gone"]
_MOST_HEADER_BYTES = 1 << 20
_READ_BYTES = 4096


class Header(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What an agent has to know before it starts.

    Attributes:
        token: the job's.
        environ: variables for it and its workers.
    """

    token: str
    environ: dict[str, str] = {}

    def __repr__(self) -> str:
        """Without the token."""
        return f"Header(environ={sorted(self.environ)})"


def encode_header(header: Header) -> bytes:
    """Its line."""
    return msgspec.json.encode(header) + b"\n"


class LauncherOrders:
    """The agent's end.

    Takes standard input away from this process: workers must not read it.

    Raises:
        ConfigError: there is no header.
    """

    def __init__(self) -> None:
        self.header = _read_header(0)
        self._fd = os.dup(0)
        null = os.open(os.devnull, os.O_RDONLY)
        os.dup2(null, 0)
        os.close(null)
        os.set_blocking(self._fd, False)
        self._partial = b""
        self._is_over = False

    def fileno(self) -> int:
        """What becomes readable when there are words."""
        return self._fd

    @property
    def is_over(self) -> bool:
        """No more will come."""
        return self._is_over

    def read(self) -> list[Word]:
        """Words that have come since the last call."""
        words: list[Word] = []
        while not self._is_over:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._is_over = True
                words.append("gone")
                break
            *lines, self._partial = (self._partial + data).split(b"\n")
            for line in lines:
                if line == b"leave":
                    words.append("leave")
                elif line == b"stop":
                    words.append("stop")
        return words


def _read_header(fd: int) -> Header:
    """The first line, and nothing behind it."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 1)
        line += data
        if not data or len(line) > _MOST_HEADER_BYTES:
            raise ConfigError(
                "--from-launcher is for `varuna run --hosts`, which says on standard input what to do."
            )
    try:
        return msgspec.json.decode(line, type=Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"What came on standard input is none of ours: {error}.") from error
