"""Workers of a run are killed, asked to leave and added; what it trains is what an undisturbed run trains.

Real commands and processes; each fault must have fired.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.e2e.conftest import Start
from tests.e2e.morphing import NUM_STEPS, fault
from varuna import cli


def command(cache: Path, *arguments: str) -> str:
    """What a `varuna` command prints."""
    done = CliRunner(env={"VARUNA_CACHE_DIR": str(cache)}).invoke(cli.main, arguments)
    assert done.exit_code == 0, done.output
    return done.output


@pytest.mark.parametrize(
    ("point", "count"),
    [("step", 1), ("forward", 2), ("final backward", 1), ("reduce", 1), ("commit", 1), ("committed", 1)],
)
def test_a_worker_is_killed(start: Start, point: str, count: int) -> None:
    run = start(fault("kill", 2, point, 7, count), limit=7)
    run.steps_done(7)  # the manager has heard what the job is
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    run.fired(2)
    assert "varuna: worker 2 was killed by SIGKILL (out of memory?); the others go on" in ended.stderr
    assert len(run.steps(2)) == 7
    run.is_exact()


def test_worker_0_is_killed_and_another_speaks_to_the_terminal(start: Start) -> None:
    run = start(fault("kill", 0, "final backward", 5), limit=5)
    run.steps_done(5)  # the manager has heard what the job is
    run.limit(NUM_STEPS)
    ended = run.ends_well()
    told = ended.stdout.splitlines()
    assert told[:5] == [f"worker 0 tells step {index}" for index in range(5)]
    assert len(told) == NUM_STEPS
    speaker = told[5].split()[1]
    assert speaker in "123"
    assert told[5:] == [f"worker {speaker} tells step {index}" for index in range(5, NUM_STEPS)]
    run.is_exact()


def test_two_are_killed_at_once(start: Start) -> None:
    """In the middle of step 6, which worker 3 holds up: one of each pipeline, one of each stage."""
    run = start(fault("delay", 3, "final backward", 6, seconds=2.0))
    run.fired(3)
    both = [run.worker(1), run.worker(2)]
    for process in both:
        process.kill()
    ended = run.ends_well()
    assert [line for line in ended.stderr.splitlines() if "SIGKILL" in line and "go on" in line][1:]
    run.is_exact()


def test_one_is_killed_while_the_next_generation_forms(start: Start) -> None:
    """Worker 3 dies in step 4, and worker 1 before it has joined the generation without worker 3."""
    faults = [fault("kill", 3, "reduce", 4), fault("kill", 1, "form", 4)]
    run = start(*faults, stages=1)
    run.ends_well()
    run.fired(3)
    run.fired(1)
    run.is_exact()


def test_a_worker_is_asked_to_leave(start: Start, cache: Path) -> None:
    run = start(limit=8)
    run.steps_done(4)
    assert "asked to leave: " in command(cache, "preempt", "3")
    run.event("notice", "is asked to leave (user)")
    run.limit(NUM_STEPS)
    run.event("running", "generation 1 runs")
    ended = run.ends_well()
    assert "SIGKILL" not in ended.stderr
    assert 4 <= len(run.steps(3)) <= 9
    run.is_exact()


def test_the_last_holder_of_a_section_hands_it_over_before_it_leaves(start: Start, cache: Path) -> None:
    run = start(stages=4, limit=8)
    run.steps_done(4)
    command(cache, "preempt", "worker-1", "--deadline", "60")
    run.event("notice", "within 60 s")
    run.limit(NUM_STEPS)
    run.ends_well()
    assert len(run.steps(1)) < 12
    assert len(run.steps(0)) == NUM_STEPS
    run.is_exact()


def test_workers_are_added(start: Start, cache: Path) -> None:
    run = start(workers=2, limit=8)
    run.steps_done(4)
    assert "for 2 more workers" in command(cache, "workers", "add", "2")
    run.event("ready")
    run.event("ready")
    run.limit(NUM_STEPS)
    run.event("running", "4 of 4 workers")
    run.ends_well()
    for newcomer in (2, 3):
        steps = run.steps(newcomer)
        assert 5 <= steps[0]["index"] <= 11
        assert steps[-1]["index"] == NUM_STEPS - 1
    run.is_exact()


def test_newcomers_find_frozen_what_the_others_have_frozen(start: Start) -> None:
    """Their script begins anew, and does not come to the step after which that was."""
    run = start(workers=2, limit=8, arguments=["switches"])
    run.steps_done(4)
    run.client.add_workers(2)
    run.event("ready")
    run.event("ready")
    run.limit(NUM_STEPS)
    run.event("running", "4 of 4 workers")
    run.ends_well()
    assert len(run.steps(2)) > 20
    run.is_exact()


def test_down_to_one_and_back_to_four(start: Start) -> None:
    faults = [fault("kill", number, "forward", 6) for number in (0, 1, 3)]
    run = start(*faults, stages=1, limit=12)
    run.event("running", "1 of 1 workers")
    run.client.add_workers(3)
    for _ in range(3):
        run.event("ready")
    run.limit(NUM_STEPS)
    run.event("running", "4 of 4 workers")
    run.ends_well()
    assert len(run.steps(2)) == NUM_STEPS
    run.is_exact()
