"""Which checkpoints may go when a newer one is durable, and which directories no save will finish. Pure."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

from varuna.checkpoint.values import SaveOrder
from varuna.errors import ConfigError

_DIRECTORY = re.compile(r"step-(\d{9,})-save-(\d{5,})-([0-9a-z]{1,32})")


@dataclass(frozen=True, kw_only=True)
class Retention:
    """What is kept.

    Attributes:
        newest: so many of the newest complete checkpoints.
        every_steps: and those whose step is a multiple of this, for ever; None for none.
    """

    newest: int = 3
    every_steps: int | None = None

    def __post_init__(self) -> None:
        if self.newest < 1:
            raise ConfigError(f"Keeping the newest {self.newest} checkpoints keeps none. Keep at least 1.")
        if self.every_steps is not None and self.every_steps < 1:
            raise ConfigError(f"Keeping checkpoints of every {self.every_steps} steps: give 1 or more.")


@dataclass(frozen=True, kw_only=True)
class Evidence:
    """What is known about a directory without a manifest.

    Attributes:
        is_held: whether a process holds it; None if the store cannot tell.
        is_ours: this process began it, and has ended it.
        idle_s: from the last change in it until now, by the store's clock; None if unknown.
    """

    is_held: bool | None
    is_ours: bool
    idle_s: float | None


def parse_directory(name: str) -> SaveOrder | None:
    """The save a directory is of, or None if it is something else."""
    found = _DIRECTORY.fullmatch(name)
    if found is None:
        return None
    return SaveOrder(step=int(found[1]), sequence=int(found[2]), save_id=found[3])


def newest_first(orders: Iterable[SaveOrder]) -> tuple[SaveOrder, ...]:
    """By sequence, then step: a job that went back to an older step goes on from what it saved since."""
    return tuple(sorted(orders, key=lambda order: (order.sequence, order.step, order.save_id), reverse=True))


def to_prune(
    complete: Iterable[SaveOrder], committed: SaveOrder, retention: Retention
) -> tuple[SaveOrder, ...]:
    """Complete checkpoints that may go now that ``committed`` is durable; oldest first.

    What was saved after it, by whomever, is not touched and does not count.
    """
    older = [order for order in newest_first(complete) if order.sequence < committed.sequence]
    spare = older[retention.newest - 1 :]
    every = retention.every_steps
    return tuple(order for order in reversed(spare) if every is None or order.step % every)


def is_leftover(evidence: Evidence, grace_s: float) -> bool:
    """Whether a directory without a manifest will never get one.

    Args:
        evidence: what is known.
        grace_s: where nothing else says so, how long nothing may have happened in it.
    """
    if evidence.is_held is not None:
        return not evidence.is_held
    if evidence.is_ours:
        return True
    return evidence.idle_s is not None and evidence.idle_s >= grace_s
