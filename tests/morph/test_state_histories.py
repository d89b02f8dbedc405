"""The manager's state machine in random histories: it ends well or says why."""

from __future__ import annotations

import random
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.morph.histories import play
from tests.morph.steering import members
from tests.morph.world import World
from tests.morph.world_parts import NUM_SECTIONS
from varuna.morph.phases import ENDED, Phase
from varuna.morph.policy import Policy

# --- random histories -----------------------------------------------------------------------

CHOICES = st.lists(st.integers(0, 10_000), max_size=250)
JOBS = st.fixed_dictionaries(
    {
        "num_founders": st.integers(2, 5),
        "least": st.integers(1, 2),
        "stages": st.sampled_from([(1,), (2, 1, 3), (1, 2), (2,)]),
        "tells_commits": st.booleans(),
        "policy": st.sampled_from([Policy(), Policy(replace_lost=True)]),
    }
)


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(choices=CHOICES, rarity=st.integers(6, 40), options=JOBS)
def test_any_history_ends_well_or_says_why(choices: list[int], rarity: int, options: dict[str, Any]) -> None:
    world = World(**options)
    play(world, choices, rarity)
    check_end(world)


def check_end(world: World) -> None:
    """No more faults: the job comes to an end, or waits for good reason; and a restart finds it as it is."""
    world.drain()
    job = world.manager.job
    assert job.phase in ENDED or job.phase is Phase.WAITING, (job.phase, job.reason, world.faults)
    assert job.reason
    assert len(world.ledger) == job.num_committed
    if job.phase is Phase.DONE:
        assert len(world.ledger) == world.num_steps
    if job.phase is Phase.WAITING and job.checkpoint is None:
        held = set().union(*(world.workers[name].versions for name in members(world)))
        assert held == set(range(NUM_SECTIONS)), "waits, though nobody could go on"
    world.restart()


def test_many_random_histories() -> None:
    """Longer ones than the above, always the same; all that is asserted is in the world."""
    for seed in range(500):
        rng = random.Random(seed)
        world = World(
            rng.randint(2, 5),
            num_steps=rng.choice((3, 5, 8)),
            least=rng.randint(1, 2),
            stages=rng.choice(((1,), (2, 1, 3), (1, 2), (2,))),
            policy=Policy(replace_lost=rng.random() < 0.5),
            tells_commits=seed % 4 > 0,
        )
        play(world, [rng.randint(0, 10_000) for _ in range(rng.randint(0, 400))], rng.randint(6, 40))
        check_end(world)


def test_a_machine_without_faults_is_done_for_every_order() -> None:
    """Messages between different senders in many orders; no fault, so nothing but DONE is right."""
    for seed in range(40):
        world = World(3, num_steps=3)
        number = seed * 7919 + 13
        while actions := world.actions():
            number = number * 1103515245 + 12345 & 0x7FFFFFFF
            actions[(number >> 8) % len(actions)]()
        assert world.manager.job.phase is Phase.DONE
        assert world.ledger == [0, 0, 0]


@pytest.mark.parametrize("phase", Phase)
def test_every_phase_has_an_exit_or_is_an_end(phase: Phase) -> None:
    from varuna.morph.phases import TRANSITIONS

    assert bool(TRANSITIONS[phase]) != (phase in ENDED)
