"""Signals to this process as something a selector can wait for."""

from __future__ import annotations

import signal
import socket
from collections.abc import Sequence
from types import TracebackType
from typing import Self


class SignalInbox:
    """While entered, the named signals do nothing by themselves but wait here to be read. Main thread only."""

    def __init__(self, signums: Sequence[signal.Signals]) -> None:
        self._signums = signums
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)
        self._old_handlers: list[signal._HANDLER] = []
        self._old_wakeup_fd = -1

    def __enter__(self) -> Self:
        self._old_wakeup_fd = signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        self._old_handlers = [signal.signal(signum, lambda *_: None) for signum in self._signums]
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for signum, handler in zip(self._signums, self._old_handlers, strict=True):
            signal.signal(signum, handler)
        signal.set_wakeup_fd(self._old_wakeup_fd)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """What to wait on."""
        return self._reader.fileno()

    def read(self) -> list[signal.Signals]:
        """Signals that arrived since the last call, in order."""
        try:
            numbers = self._reader.recv(4096)
        except BlockingIOError:
            return []
        return [signal.Signals(number) for number in numbers if number in self._signums]
