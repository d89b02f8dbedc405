"""How long this worker ran tasks in a step: slow workers are found by it, and waiting for others is no part."""

from __future__ import annotations

import time

import torch


class BusyTime:
    """Adds up stretches of work; cheap enough to run in every step.

    On a CPU that is the time from ``begin`` to ``end``. A CUDA device works on when the host has gone on: there
    it is the time between two events on its stream.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._is_cuda = device.type == "cuda"
        self._host_s = 0.0
        self._since_s = 0.0
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """A new step."""
        self._host_s = 0.0
        self._events = []

    def begin(self) -> None:
        """Work begins."""
        if self._is_cuda:
            self._events.append((_event(), _event()))
            self._events[-1][0].record(torch.cuda.current_stream(self._device))
        else:
            self._since_s = time.monotonic()

    def end(self) -> None:
        """It is done, or handed to the device."""
        if self._is_cuda:
            self._events[-1][1].record(torch.cuda.current_stream(self._device))
        else:
            self._host_s += time.monotonic() - self._since_s

    def seconds(self) -> float:
        """Since the last ``reset``; on a CUDA device this waits for what was handed to it."""
        if self._events:
            self._events[-1][1].synchronize()
        device_ms: float = sum(first.elapsed_time(last) for first, last in self._events)
        return self._host_s + device_ms / 1000.0


def _event() -> torch.cuda.Event:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
