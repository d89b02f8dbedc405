"""One clock for the spans of all workers: worker 0's ``time.monotonic``.

Processes of one machine share that clock. A worker on another machine asks worker 0 for its time and halves
the round trip (Cristian, "Probabilistic clock synchronization", 1989): the error is at most half the round trip
of the quickest of several exchanges. Clocks drift by some 10 µs a second: measure shortly before or after use.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from varuna.run.group import Group

NUM_EXCHANGES = 16

Now = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class ClockOffset:
    """How to get worker 0's time from one's own: add ``offset_s``, which is right to ``accuracy_s``."""

    offset_s: float = 0.0
    accuracy_s: float = 0.0


@dataclass(frozen=True, kw_only=True)
class Exchange:
    """One question and its answer: own clock when asked and when answered, worker 0's in between."""

    asked_s: float
    there_s: float
    answered_s: float


def machine_identity() -> str:
    """Equal for processes that share ``time.monotonic``: one boot of one kernel, one time namespace."""
    with suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot}/{Path('/proc/self/ns/time').readlink()}"
    return socket.gethostname()


def align_clocks(
    group: Group, rank: int, *, machine: str, now_s: Now = time.monotonic
) -> tuple[ClockOffset, ...]:
    """Every member's offset to the first one's clock, in the order of the group. All members call it together.

    Args:
        group: all workers.
        rank: this worker's, in the world.
        machine: ``machine_identity()``; members with the first one's share its clock.
        now_s: own clock.

    Raises:
        PeerLost: a worker is gone.
    """
    machines = group.all_gather_json(machine)
    own = ClockOffset()
    for other, where in zip(group.ranks, machines, strict=True):
        if where == machines[0]:
            continue
        if rank == other:
            own = offset_of([_ask(group, now_s) for _ in range(NUM_EXCHANGES)])
        elif rank == group.ranks[0]:
            for _ in range(NUM_EXCHANGES):
                _answer(group, other, now_s)
    gathered = group.all_gather_json([own.offset_s, own.accuracy_s])
    return tuple(ClockOffset(offset_s=offset_s, accuracy_s=accuracy_s) for offset_s, accuracy_s in gathered)


def offset_of(exchanges: Sequence[Exchange]) -> ClockOffset:
    """From the quickest exchange; ``accuracy_s`` is half of its round trip."""
    best = min(exchanges, key=lambda exchange: exchange.answered_s - exchange.asked_s)
    middle_s = (best.asked_s + best.answered_s) / 2
    return ClockOffset(offset_s=best.there_s - middle_s, accuracy_s=(best.answered_s - best.asked_s) / 2)


def _ask(group: Group, now_s: Now) -> Exchange:
    answer = group.place(torch.zeros(1, dtype=torch.float64))
    asked_s = now_s()
    group.send(group.place(torch.zeros(1, dtype=torch.float64)), group.ranks[0])
    group.receive(answer, group.ranks[0])
    there_s = answer.item()
    return Exchange(asked_s=asked_s, there_s=there_s, answered_s=now_s())


def _answer(group: Group, rank: int, now_s: Now) -> None:
    question = group.place(torch.zeros(1, dtype=torch.float64))
    group.receive(question, rank)
    group.send(group.place(torch.tensor([now_s()], dtype=torch.float64)), rank)
