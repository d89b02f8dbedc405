"""Workers are lost, or come, where the next generation begins: who serves its store, who gives, who joins."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import Start
from tests.e2e.morphing import NUM_STEPS, fault
from tests.launch.jobs import wait_until
from varuna.testing.faults import Point

HEARTBEAT = {"VARUNA_HEARTBEAT_S": "3"}


@pytest.mark.parametrize("point", ["join", "form", "transfer"])
def test_a_newcomer_is_killed_on_its_way_in(start: Start, point: Point) -> None:
    run = start(fault("kill", 2, point), workers=2, stages=1, limit=8)
    run.steps_done(4)
    run.client.add_workers(1)
    if point == "join":
        run.event("lost", "newcomer ")
    else:
        run.event("ready")
    run.limit(NUM_STEPS)
    run.ends_well()
    assert run.script.fired()[0].worker == 2
    assert len(run.steps(0)) == len(run.steps(1)) == NUM_STEPS
    run.is_exact()


def test_whoever_gives_sections_away_is_killed_in_the_middle_of_it(start: Start) -> None:
    run = start(fault("kill", 0, "transfer", count=2), workers=2, stages=1, limit=8)
    run.steps_done(4)
    run.client.add_workers(2)
    run.event("ready")
    run.event("ready")
    run.limit(NUM_STEPS)
    run.ends_well()
    assert len(run.steps(0)) < 12
    for newcomer in (2, 3):
        assert run.steps(newcomer)[-1]["index"] == NUM_STEPS - 1
    run.is_exact()


def test_pipelines_and_stages_both_change(start: Start) -> None:
    """2 pipelines of 2 stages, one worker alone, 2 of 2 again: everything is handed over, twice."""
    run = start(limit=8)
    run.steps_done(4)
    for number in (0, 1, 3):
        run.client.preempt(str(number))
    run.limit(20)
    run.event("running", "1 of 1 workers, 1 pipeline")
    run.client.add_workers(3)
    for _ in range(3):
        run.event("ready")
    run.limit(NUM_STEPS)
    run.event("running", "4 of 4 workers, 2 pipelines")
    run.ends_well()
    assert len(run.steps(2)) == NUM_STEPS
    run.is_exact()


# --- the store ------------------------------------------------------------------------------


def test_the_first_store_is_killed(start: Start) -> None:
    """All go on in a generation of their own store; whoever serves that is killed, too."""
    run = start(fault("kill", 0, "reduce", 25), limit=10)
    run.steps_done(5)
    run.process("varuna-store").kill()
    run.limit(20)
    run.event("running", "4 of 4 workers")
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    assert "varuna: the process that hosted the first rendezvous store has died" in ended.stderr
    assert len(run.steps(0)) == 25
    assert len(run.steps(1)) == NUM_STEPS
    run.is_exact()


def test_whoever_serves_the_store_is_killed_while_the_others_meet_there(start: Start) -> None:
    run = start(fault("kill", 3, "reduce", 4), fault("kill", 0, "form", 4), stages=1)
    run.ends_well()
    assert [one.worker for one in run.script.fired()] == [3, 0]
    run.is_exact()


# --- silence --------------------------------------------------------------------------------


def test_a_short_freeze_costs_nothing_but_time(start: Start) -> None:
    run = start(fault("freeze", 2, "forward", 6, 2, seconds=0.5), environ=HEARTBEAT)
    ended = run.ends_well()
    assert "worker 2" not in ended.stderr
    assert len(run.steps(2)) == NUM_STEPS
    run.is_exact()


def test_a_worker_whose_connections_are_dead_is_fenced(start: Start) -> None:
    """It computes, and hears of nothing; nobody hears of it."""
    run = start(fault("cut", 2, "forward", 6, 2), environ=HEARTBEAT)
    run.fired(2)
    assert run.worker(2).is_running()
    run.event("fenced", "no sign of life for ")
    run.ends_well()
    assert len(run.steps(2)) == 6
    run.is_exact()


def test_a_worker_that_serves_the_store_is_cut_off(start: Start) -> None:
    """Worker 0 serves the store of generation 1, in which worker 3 is missing."""
    run = start(fault("kill", 3, "reduce", 4), fault("cut", 0, "commit", 8), stages=1, environ=HEARTBEAT)
    run.ends_well()
    assert len(run.steps(0)) == 8
    assert len(run.steps(1)) == NUM_STEPS
    run.is_exact()


def test_a_delay_is_waited_for(start: Start) -> None:
    run = start(fault("delay", 1, "reduce", 6, seconds=0.3))
    ended = run.ends_well()
    assert "varuna: worker" not in ended.stderr
    wait_until(lambda: run.steps(0)[6]["duration_s"] >= 0.3, 1)
    run.is_exact()
