"""What a launcher on another machine says to the agent that it started: over the agent's standard input.

First one line of JSON (``Header``): nothing secret, and nothing that a shell could misread, is ever on a
command line. Then orders, a line each. The end of the stream means that the launcher, or the way to it, is
gone.
"""

from __future__ import annotations

import os
import re
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


class Order(msgspec.Struct, frozen=True, kw_only=True):
    """What an agent is to do.

    Attributes:
        word: leave in good order, stop at once, or get along without a launcher.
        within_s: how long leaving may take; None for the agent's own grace.
    """

    word: Word
    within_s: float | None = None


def encode_header(header: Header) -> bytes:
    """Its line."""
    return msgspec.json.encode(header) + b"\n"


def encode_order(order: Order) -> bytes:
    """Its line: ``leave``, ``leave 12.5`` or ``stop``."""
    within = "" if order.within_s is None else f" {order.within_s:.1f}"
    return f"{order.word}{within}\n".encode()


def decode_order(line: bytes) -> Order | None:
    """The order of a line, without its end; None for what is none, as a later version may say."""
    word, _, within = line.partition(b" ")
    if word == b"stop" and not within:
        return Order(word="stop")
    if word == b"leave" and (not within or re.fullmatch(rb"\d{1,9}(\.\d+)?", within)):
        return Order(word="leave", within_s=float(within) if within else None)
    return None


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
        """What becomes readable when there are orders."""
        return self._fd

    @property
    def is_over(self) -> bool:
        """No more will come."""
        return self._is_over

    def read(self) -> list[Order]:
        """Those that have come since the last call."""
        orders: list[Order] = []
        while not self._is_over:
            try:
                data = os.read(self._fd, _READ_BYTES)
            except BlockingIOError:
                break
            if not data:
                self._is_over = True
                orders.append(Order(word="gone"))
                break
            *lines, self._partial = (self._partial + data).split(b"\n")
            orders += [order for order in map(decode_order, lines) if order is not None]
        return orders


def _read_header(fd: int) -> Header:
    """The first line, and nothing behind it."""
    line = b""
    while not line.endswith(b"\n"):
        data = os.read(fd, 1)
        line += data
        if not data or len(line) > _MOST_HEADER_BYTES:
            raise ConfigError("--from-launcher is for `varuna run`, which says on standard input what to do.")
    try:
        return msgspec.json.decode(line, type=Header)
    except msgspec.DecodeError as error:
        raise ConfigError(f"What came on standard input is none of ours: {error}.") from error
