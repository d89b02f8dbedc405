"""Random histories of a world: which fault comes when is read off a list of numbers."""

from __future__ import annotations

from collections.abc import Sequence

from tests.morph.world import World
from tests.morph.world_parts import Worker

FAULTS = ("kill", "notice", "machine", "freeze", "lose", "join", "fail", "restart", "break", "time", "save")


def play(world: World, choices: Sequence[int], rarity: int) -> None:
    """What could happen, or every ``rarity``-th time or so a fault, as the numbers say."""
    for choice in choices:
        actions = world.actions()
        if choice % rarity == 0 or not actions:
            inject(world, choice // rarity)
        else:
            actions[choice % len(actions)]()


def inject(world: World, number: int) -> None:
    """One fault, picked by a number."""
    kind = FAULTS[number % len(FAULTS)]
    alive = [worker for worker in world.workers.values() if worker.is_alive]
    if kind == "join":
        if len(world.workers) < 8:
            world.join()
    elif kind == "restart":
        world.restart()
    elif kind == "save":
        world.save()
    elif kind == "time":
        world.advance((number // len(FAULTS) % 8) * 0.9)
        for worker in alive:  # and those that were frozen come round
            worker.frozen = False
    elif alive:
        _hurt(world, kind, alive[number // len(FAULTS) % len(alive)], number)


def _hurt(world: World, kind: str, worker: Worker, number: int) -> None:
    if kind == "kill":
        world.kill(worker)
    elif kind in ("notice", "machine"):
        world.notice(worker, (0.0, 3.0, 30.0)[number % 3], by_machine=kind == "machine")
    elif kind == "freeze":
        world.freeze(worker)
    elif kind == "lose":
        world.lose(worker)
    elif kind == "fail" and number % 5 == 0:
        world.fail(worker)
    elif kind == "break":
        world.reconnect(worker, is_lossy=number % 2 == 0)
