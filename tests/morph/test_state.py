"""The manager's state machine against workers that behave as members do: scripted and random histories."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.morph.histories import play
from tests.morph.world import NUM_SECTIONS, World
from varuna.generations import HaltReport
from varuna.morph.instructions import Send
from varuna.morph.messages import (
    Abort,
    CheckpointComplete,
    Formed,
    Halted,
    JobEnded,
    Leave,
    LeaveAsked,
    Pause,
    Ready,
    StopWorker,
)
from varuna.morph.phases import ENDED, Phase
from varuna.morph.policy import Policy
from varuna.morph.record import WorkerStatus


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


def test_an_undisturbed_job() -> None:
    world = started(4)
    check_done(world)
    assert set(world.ledger) == {0}
    assert world.manager.job.generation.number == 0


def test_a_death_aborts_the_others_and_they_go_on() -> None:
    world = started(4, num_steps=4)
    world.kill(world.workers["w2"])
    run(world, lambda: world.manager.job.phase is Phase.ENDING)
    assert world.manager.job.generation.number == 0
    run(world, lambda: world.manager.job.phase is Phase.RUNNING)
    assert members(world) == ["w0", "w1", "w3"]
    check_done(world)


def test_the_manager_waits_for_all_reports_and_never_for_the_dead() -> None:
    world = started(4)
    world.kill(world.workers["w1"])
    world.freeze(world.workers["w3"])
    run(world, lambda: not world.actions())
    assert world.manager.job.phase is Phase.ENDING
    assert set(world.manager.job.generation.reports) == {"w0", "w2"}
    world.kill(world.workers["w3"])
    run(world, lambda: world.manager.job.phase is Phase.RUNNING)
    assert members(world) == ["w0", "w2"]
    check_done(world)


def test_who_does_not_report_is_fenced() -> None:
    world = started(4, policy=Policy(halt_limit_s=7.0))
    world.kill(world.workers["w1"])
    world.freeze(world.workers["w3"])
    run(world, lambda: not world.actions())
    world.advance(6.9)
    assert world.manager.job.phase is Phase.ENDING
    world.advance(0.2)
    assert world.manager.job.workers["w3"].is_fenced
    assert not world.workers["w3"].is_alive, "its agent was not told to kill it"
    check_done(world)


def test_a_spontaneous_halt_ends_the_generation() -> None:
    world = started(3)
    world._halt(world.workers["w1"], "it lost sight of w2")
    run(world, lambda: world.manager.job.phase is Phase.ENDING)
    assert set(sent(world, Abort)) >= {"w0", "w2"} - set(world.manager.job.generation.reports)
    check_done(world)
    assert len(set(world.ledger)) >= 1
    assert world.manager.job.generation.number == 1


def test_a_notice_pauses_after_a_step_and_the_worker_leaves() -> None:
    world = started(4, stages=(1,), num_steps=8)
    world.notice(world.workers["w3"], 120.0)
    run(world, lambda: world.manager.job.phase is Phase.PAUSING)
    assert sent(world, Pause) == ["w0", "w1", "w2", "w3"]
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    assert world.manager.job.workers["w3"].status is WorkerStatus.LEAVING
    assert members(world) == ["w0", "w1", "w2"]
    check_done(world)
    assert world.workers["w3"].ended_well
    assert not told(world, "ending"), "nothing was given up"


def test_the_last_holder_gives_its_sections_away_before_it_leaves() -> None:
    world = started(2, stages=(1, 1, 2), num_steps=8)
    stage = world.workers["w1"].plan.stage_of(1)  # type: ignore[union-attr]
    assert stage is not None
    assert stage.first_section > 0, "both have everything: nothing to show"
    world.notice(world.workers["w1"], 0.0)
    run(world, lambda: world.manager.job.generation.number == 1)
    assert world.manager.job.generation.givers == ("w1",)
    run(world, lambda: world.manager.job.generation.number == 2)
    assert members(world) == ["w0"]
    check_done(world)
    assert world.workers["w1"].ended_well
    assert world.ledger.count(1) == 1, "it left after one more step"


def test_who_is_needed_stays_until_a_newcomer_comes() -> None:
    world = started(2, least=2, stages=(1,), num_steps=8)
    world.notice(world.workers["w1"], 100.0)
    run(world, lambda: bool(told(world, "decision")))
    assert world.manager.job.phase is Phase.RUNNING
    assert "still needed" in told(world, "decision")[0]
    world.join()
    run(world, lambda: world.manager.job.generation.number == 1)
    assert members(world) == ["w0", "w2"]
    check_done(world)


def test_two_notices_are_one_morph() -> None:
    world = started(4, stages=(1,), num_steps=8)
    world.notice(world.workers["w1"], 100.0)
    world.notice(world.workers["w2"], 100.0)
    run(world, lambda: world.manager.job.generation.number == 1)
    assert members(world) == ["w0", "w3"]
    check_done(world)
    assert world.manager.job.generation.number == 1


def test_a_notice_of_a_machine_is_of_all_its_workers() -> None:
    world = started(4, stages=(1,), num_steps=8)
    world.notice(world.workers["w1"], 100.0, by_machine=True)
    run(world, lambda: world.manager.job.generation.number == 1)
    assert members(world) == ["w0", "w2"]
    check_done(world)


def test_a_step_that_would_end_too_late_is_given_up() -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.notice(world.workers["w2"], 10.0)
    run(world, lambda: world.manager.job.phase is Phase.PAUSING)
    world.advance(8.0)
    assert world.manager.job.phase is Phase.PAUSING
    world.advance(1.5)
    assert world.manager.job.phase is Phase.ENDING
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    assert members(world) == ["w0", "w1"]
    check_done(world)


def test_a_leaver_that_dies_is_a_death() -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.notice(world.workers["w2"], 10.0)
    run(world, lambda: world.manager.job.phase is Phase.PAUSING)
    world.kill(world.workers["w2"])
    check_done(world)


def test_a_newcomer_joins_after_the_others_in_rank() -> None:
    world = started(3, stages=(1,), num_steps=9)
    world.join()
    run(world, lambda: world.manager.job.generation.number == 1)
    assert members(world) == ["w0", "w1", "w2", "w3"]
    assert not told(world, "ending")
    check_done(world)
    assert world.workers["w3"].ended_well
    assert world.workers["w3"].num_applied == 9


def test_a_newcomer_that_would_not_help_stays_out() -> None:
    world = started(3, stages=(3,), num_steps=5)  # 4 workers make one pipeline of 3 stages as 3 do
    world.join()
    check_done(world)
    assert set(world.ledger) == {0}
    assert any("stay" in text for text in told(world, "decision"))


def test_too_few_wait_for_a_newcomer() -> None:
    world = started(2, least=2, stages=(1,))
    world.kill(world.workers["w0"])
    run(world, lambda: world.manager.job.phase is Phase.WAITING)
    assert "2" in world.manager.job.reason
    world.drain()
    assert world.manager.job.phase is Phase.WAITING
    world.join()
    run(world, lambda: world.manager.job.phase is Phase.RUNNING)
    assert members(world) == ["w1", "w2"]
    check_done(world)


def test_lost_sections_are_named() -> None:
    world = started(2, stages=(1, 1, 2))
    world.kill(world.workers["w1"])
    world.drain()
    assert world.manager.job.phase is Phase.FAILED
    assert "sections 2, 3" in world.manager.job.reason
    assert "w1 (was ended by signal 9)" in world.manager.job.reason


def test_lost_sections_come_from_the_checkpoint() -> None:
    """The whole job goes back to it; the steps since then happen again."""
    world = started(2, stages=(1, 1, 2), num_steps=8)
    run(world, lambda: len(world.ledger) == 2)
    world.save()
    run(world, lambda: len(world.ledger) >= 4)
    world.kill(world.workers["w1"])
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    assert world.ledger == [0, 0]
    form = world.manager.job.generation.forms["w0"]
    assert (form.checkpoint, form.formation.next_step, form.formation.transfers) == ("step-2", 2, ())
    assert "sections 2, 3" in told(world, "going back")[0]
    check_done(world)
    assert world.ledger == [0, 0, 1, 1, 1, 1, 1, 1]


def test_nobody_is_left_but_a_checkpoint() -> None:
    world = started(2, stages=(1,), num_steps=8)
    run(world, lambda: len(world.ledger) == 3)
    world.save()
    for worker in list(world.workers.values()):
        world.kill(worker)
    world.drain()
    assert world.manager.job.phase is Phase.WAITING
    world.join()
    check_done(world)
    assert world.ledger[:3] == [0, 0, 0]
    assert world.workers["w2"].num_applied == 8


def test_an_older_checkpoint_does_not_count() -> None:
    world = started(2)
    for step in (4, 2):
        world.manager.handle("", CheckpointComplete(next_step=step, address=f"step-{step}"), 0.0)
    assert world.manager.job.checkpoint == CheckpointComplete(next_step=4, address="step-4")


def test_a_failing_script_ends_the_job_at_once() -> None:
    world = started(3)
    world.fail(world.workers["w1"])
    run(world, lambda: world.manager.job.phase is Phase.FAILED)
    assert "ValueError: the user's" in world.manager.job.reason
    assert world.ended_agents == set(world.agents)


def test_a_newcomer_that_fails_ends_nothing() -> None:
    world = started(3, stages=(1,))
    world.join()
    world.fail(world.workers["w3"])
    check_done(world)


def test_newcomers_that_fail_alike_while_the_job_waits_end_it() -> None:
    world = started(2, least=2, stages=(1,))
    world.kill(world.workers["w1"])
    run(world, lambda: world.manager.job.phase is Phase.WAITING)
    for name in ("w2", "w3", "w4"):
        assert world.manager.job.phase is Phase.WAITING
        world.join()
        world.fail(world.workers[name])
        world.drain()
    assert world.manager.job.phase is Phase.FAILED
    assert "ValueError" in world.manager.job.reason


def test_a_newcomer_that_dies_while_it_joins_delays_nobody() -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.join()
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    world.kill(world.workers["w3"])
    check_done(world)
    assert world.manager.job.generation.number == 2


def test_deaths_while_a_generation_forms() -> None:
    world = started(4, stages=(1,), num_steps=8)
    world.kill(world.workers["w3"])
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    world.kill(world.workers["w0"])
    check_done(world)
    assert members(world) == []
    assert world.manager.job.generation.members == ("w1", "w2")


def test_a_fenced_worker_is_sent_away() -> None:
    world = started(3, stages=(1,))
    world.lose(world.workers["w2"])
    instructions = world.manager.handle("w2", Halted(report=halted(0, 3, committed_step=7)), world.now_s)
    assert [type(one.message) for one in instructions if isinstance(one, Send)] == [Leave]
    check_done(world)


def test_messages_of_another_generation_change_nothing() -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.kill(world.workers["w2"])
    run(world, lambda: world.manager.job.phase is Phase.RUNNING and world.manager.job.generation.number == 1)
    before = world.snapshot()
    for generation in (0, 2):
        world.manager.handle("w1", Halted(report=halted(generation, 1)), world.now_s)
    assert world.snapshot() == before


def test_a_founder_lost_before_the_job_has_begun() -> None:
    world = World(3)
    world.kill(world.workers["w1"])
    world.workers["w1"].outbox.clear()
    for worker in world.workers.values():
        worker.frozen = True
    for _ in range(10):
        for action in world.actions()[:1]:
            action()
    world.advance(1.0)
    assert world.manager.job.phase is Phase.FOUNDING
    world.advance(5.0)
    assert world.manager.job.phase is Phase.FAILED
    assert "before the first generation" in world.manager.job.reason


def test_replacements_are_asked_for() -> None:
    world = started(3, stages=(1,), num_steps=9, policy=Policy(replace_lost=True))
    world.kill(world.workers["w1"])
    run(world, lambda: len(world.workers) == 4)
    assert world.workers["w3"].agent == world.workers["w1"].agent
    check_done(world)


def test_what_was_missed_is_said_again() -> None:
    world = started(3, stages=(1,))
    world.notice(world.workers["w2"], 100.0)
    run(world, lambda: world.manager.job.phase is Phase.PAUSING)
    again = world.manager.repeat_for("w0")
    assert [one.message for one in again if isinstance(one, Send)] == [Pause(generation=0)]
    world.kill(world.workers["w1"])
    run(world, lambda: world.manager.job.phase is Phase.ENDING)
    assert isinstance(world.manager.repeat_for("w0")[0].message, Abort)  # type: ignore[union-attr]
    world.manager.handle("m0", LeaveAsked(incarnation="nobody", source="test"), world.now_s)
    check_done(world)
    assert world.manager.repeat_for("m0") == (Send(recipient="m0", message=JobEnded(failure="")),)


def test_a_fenced_worker_is_stopped_again_when_its_agent_is_back() -> None:
    world = started(3, stages=(1,))
    world.lose(world.workers["w2"])
    world.agents["m0"].clear()  # its end is not known yet
    (again,) = world.manager.repeat_for("m0")
    assert again == Send(recipient="m0", message=StopWorker(incarnation="w2"))


@pytest.mark.parametrize("tells_commits", [True, False])
def test_a_step_that_only_the_dead_saw_committed(tells_commits: bool) -> None:
    """If the manager knows the outcome, the others make the update; if not, they run the step again."""
    world = started(3, stages=(1,), tells_commits=tells_commits)
    workers = list(world.workers.values())
    run(world, lambda: all(worker.reduced for worker in workers))
    world.freeze(workers[0])
    world.freeze(workers[1])
    run(world, lambda: len(world.ledger) == 1)
    world.kill(workers[2])
    for worker in workers[:2]:
        worker.frozen = False
        world._halt(worker, "a peer is lost")  # before its own commit has returned
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    assert world.ledger == ([0] if tells_commits else [])
    assert bool(world.manager.job.generation.forms["w0"].committed) == tells_commits
    check_done(world)
    assert world.ledger[0] == (0 if tells_commits else 1)


def test_a_step_that_one_survivor_saw_committed_is_not_run_again() -> None:
    world = started(3, stages=(1,))
    workers = list(world.workers.values())
    run(world, lambda: all(worker.reduced for worker in workers))
    world.freeze(workers[0])
    world.freeze(workers[1])
    run(world, lambda: len(world.ledger) == 1)
    world.kill(workers[1])
    workers[0].frozen = False
    world._halt(workers[0], "a peer is lost")
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    assert world.ledger == [0]
    assert world.manager.job.generation.forms["w0"].committed
    assert not world.manager.job.generation.forms["w2"].committed
    check_done(world)


def test_a_form_that_got_lost_is_said_again() -> None:
    world = started(3, stages=(1,))
    world.kill(world.workers["w2"])
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    report = world.workers["w1"].state
    assert isinstance(report, Halted)
    (again,) = world.manager.handle("w1", report, world.now_s)
    assert again == Send(recipient="w1", message=world.manager.job.generation.forms["w1"])
    check_done(world)


def test_a_form_for_a_newcomer_that_got_lost_is_said_again() -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.join()
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    (again,) = world.manager.handle("w3", Ready(digest="d"), world.now_s)
    assert again == Send(recipient="w3", message=world.manager.job.generation.forms["w3"])
    check_done(world)


def test_an_old_formed_does_not_open_a_generation() -> None:
    world = started(3, stages=(1,))
    world.kill(world.workers["w2"])
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    for name in ("w0", "w1"):
        assert world.manager.handle(name, Formed(generation=0), world.now_s) == ()
    assert world.manager.job.phase is Phase.FORMING
    check_done(world)


def test_a_job_that_waits_may_lose_its_last_holder() -> None:
    world = started(3, least=3, stages=(1,))
    world.kill(world.workers["w0"])
    run(world, lambda: world.manager.job.phase is Phase.WAITING)
    world.kill(world.workers["w1"])
    world.drain()
    assert world.manager.job.phase is Phase.WAITING
    world.kill(world.workers["w2"])
    world.drain()
    assert world.manager.job.phase is Phase.FAILED
    assert "sections 0, 1, 2, 3" in world.manager.job.reason


def test_a_member_that_halts_before_all_have_formed_the_first_generation() -> None:
    world = World(3, stages=(1,))
    world.freeze(world.workers["w2"])
    run(world, lambda: not world.actions())
    assert world.manager.job.phase is Phase.FOUNDING
    world._halt(world.workers["w1"], "it lost sight of w2")
    run(world, lambda: world.manager.job.phase is Phase.ENDING)
    assert sent(world, Abort) == ["w0", "w2"]
    world.workers["w2"].frozen = False
    check_done(world)
    assert world.manager.job.generation.number == 1


def test_a_founder_that_is_killed_once_the_plan_is_known() -> None:
    world = World(3, stages=(1,))
    world.freeze(world.workers["w2"])
    run(world, lambda: not world.actions())
    world.kill(world.workers["w2"])
    world.workers["w2"].outbox.clear()
    check_done(world)
    assert world.manager.job.generation.members == ("w0", "w1")


def test_members_that_pause_wait_for_one_another_only_so_long() -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.notice(world.workers["w1"], 0.0)
    run(world, lambda: world.manager.job.phase is Phase.PAUSING)
    run(world, lambda: any(worker.returned for worker in world.workers.values()))
    late = next(worker for worker in world.workers.values() if not worker.returned)
    world.freeze(late)
    run(world, lambda: len(world.manager.job.generation.reports) == 2)
    world.advance(0.9)
    assert world.manager.job.phase is Phase.PAUSING
    world.advance(0.2)
    assert world.manager.job.phase is Phase.ENDING
    late.frozen = False
    check_done(world)


def test_a_generation_that_does_not_open_is_given_up() -> None:
    world = started(3, stages=(1,), num_steps=8, policy=Policy(forming_limit_s=30.0, halt_limit_s=5.0))
    world.join()
    run(world, lambda: world.manager.job.phase is Phase.FORMING)
    world.freeze(world.workers["w3"])
    run(world, lambda: not world.actions())
    world.advance(29.0)
    assert world.manager.job.phase is Phase.FORMING
    world.advance(1.5)
    assert world.manager.job.phase is Phase.ENDING
    run(world, lambda: not world.actions())
    world.advance(5.5)
    assert world.manager.job.workers["w3"].is_fenced
    check_done(world)


def test_a_script_that_exits_with_a_code_ends_the_job() -> None:
    world = started(3)
    world._exit(world.workers["w1"], 3)
    run(world, lambda: world.manager.job.phase is Phase.FAILED)
    assert world.manager.job.reason == "w1 exited with code 3"


def test_members_that_halt_after_others_have_ended() -> None:
    """Worker 1 has ended; 0 waits for it in vain, is asked to give up, and ends as well: the job is done."""
    world = started(3, stages=(1,), policy=Policy(halt_limit_s=5.0))
    everybody = list(world.workers.values())
    run(world, lambda: all(worker.num_applied == world.num_steps for worker in everybody))
    for name in ("w0", "w2"):
        world.freeze(world.workers[name])
    run(world, lambda: world.manager.job.phase is Phase.FINISHING)
    world.kill(world.workers["w2"])
    run(world, lambda: world.manager.job.phase is Phase.ENDING)
    world.advance(100.0)
    assert world.manager.job.phase is Phase.ENDING, "worker 0 may be saving the model: no limit"
    assert not world.manager.job.workers["w0"].is_fenced
    world.workers["w0"].inbox.clear()
    world.workers["w0"].frozen = False
    check_done(world)


def test_worker_0_lost_before_its_script_has_ended() -> None:
    world = started(3, stages=(1,))
    run(world, lambda: world.workers["w0"].num_applied == world.num_steps)
    world.freeze(world.workers["w0"])
    run(world, lambda: not world.workers["w2"].is_alive and not world.workers["w1"].is_alive)
    world.kill(world.workers["w0"])
    world.drain()
    assert world.manager.job.phase is Phase.FAILED
    assert "worker 0 was lost after the last step" in world.manager.job.reason


def test_the_earliest_deadline_counts() -> None:
    world = started(3, stages=(1,), num_steps=8)
    for worker in world.workers.values():
        worker.frozen = True
    for deadline_s, counts_s in ((0.0, None), (50.0, 50.0), (20.0, 20.0), (90.0, 20.0), (0.0, 20.0)):
        world.deliver("m0", LeaveAsked(incarnation="w2", deadline_s=deadline_s, source="test"))
        leaving = world.manager.job.workers["w2"].leaving
        assert leaving is not None
        assert leaving.deadline_s == counts_s
    assert len(told(world, "notice")) == 1


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
