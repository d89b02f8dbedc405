"""Driving a world of workers to where a test wants it, and looking at what the manager has said."""

from __future__ import annotations

import itertools
from collections.abc import Callable

from tests.morph.world import World
from tests.morph.world_parts import NUM_SECTIONS
from varuna.generations import HaltReport
from varuna.morph.phases import Phase


def started(num_founders: int = 3, **options: object) -> World:
    """A world whose first generation runs."""
    world = World(num_founders, **options)  # type: ignore[arg-type]
    run(world, lambda: world.manager.job.phase is Phase.RUNNING)
    return world


def run(world: World, until: Callable[[], bool]) -> None:
    """Let everything happen in turn until something holds."""
    for count in itertools.count():
        if until():
            return
        actions = world.actions()
        assert actions, f"nothing happens any more in {world.manager.job.phase}: {world.manager.job.reason}"
        actions[count % len(actions)]()
        assert count < 5_000, "it never happens"


def check_done(world: World) -> None:
    world.drain()
    assert world.manager.job.phase is Phase.DONE, (world.manager.job.reason, world.faults)
    assert len(world.ledger) == world.num_steps
    for worker in world.workers.values():
        if worker.ended_well and worker.num_applied == world.num_steps:
            assert set(worker.versions.values()) <= {world.num_steps}
    assert world.ended_agents == set(world.agents)


def sent(world: World, kind: type) -> list[str]:
    """Who would get a message of a kind if it was sent now: unread inboxes."""
    return [
        worker.name
        for worker in world.workers.values()
        if any(isinstance(message, kind) for message in worker.inbox)
    ]


def members(world: World) -> list[str]:
    return [member.incarnation for member in world.manager.job.members()]


def halted(generation: int, num_applied: int, *, committed_step: int | None = None) -> HaltReport:
    return HaltReport(
        generation=generation,
        num_applied=num_applied,
        reduced_step=None,
        committed_step=committed_step,
        committed="" if committed_step is None else "outcome",
        held_sections=tuple(range(NUM_SECTIONS)),
        reason="test",
    )


def told(world: World, kind: str) -> list[str]:
    return [tell.text for tell in world.tells if tell.kind == kind]
