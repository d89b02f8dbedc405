"""The manager's state machine against workers that behave as members do: scripted histories."""

from __future__ import annotations

import msgspec
import pytest

from tests.morph.steering import check_done, halted, members, run, sent, started, told
from varuna.morph.instructions import Send
from varuna.morph.messages import (
    Abort,
    CheckpointComplete,
    Halted,
    Leave,
    Pause,
)
from varuna.morph.phases import Phase
from varuna.morph.policy import Policy
from varuna.morph.record import WorkerStatus


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
    run(world, lambda: world.manager.job.num_committed == 5)
    for step in (4, 2):
        saved = CheckpointComplete(next_step=step, sequence=step, address=f"step-{step}")
        world.manager.handle("w0", saved, 0.0)
    assert world.manager.job.checkpoint == CheckpointComplete(next_step=4, sequence=4, address="step-4")


def test_a_checkpoint_from_a_worker_that_is_out_does_not_count() -> None:
    world = started(3, stages=(1,))
    run(world, lambda: world.manager.job.num_committed == 2)
    world.lose(world.workers["w1"])
    world.manager.handle("w1", CheckpointComplete(next_step=1, sequence=1, address="step-1"), 0.0)
    assert world.manager.job.checkpoint is None


@pytest.mark.parametrize("is_found", [False, True])
def test_a_checkpoint_of_steps_that_the_manager_has_missed(is_found: bool) -> None:
    """Members made them, and saved, while it was away; a member tells it, or a newcomer that has looked."""
    world = started(2, stages=(1,), num_steps=8)
    run(world, lambda: len(world.ledger) == 3)
    world.save()
    missed = CheckpointComplete(next_step=6, sequence=5, address="step-6", is_found=is_found)
    world.saved.append(missed)
    if not is_found:
        world.deliver("w0", missed)
    for worker in list(world.workers.values()):
        world.kill(worker)
    world.drain()
    world.join()
    if is_found:
        world.deliver("w2", missed)
    check_done(world)
    assert "back to step 6, step-6" in told(world, "going back")[-1]
    assert world.ledger == [0, 0, 0, 0, 0, 0, 1, 1]
    assert world.workers["w2"].num_applied == 8


def test_what_was_in_the_place_before_the_job_began_does_not_count_if_it_is_found() -> None:
    world = started(2, stages=(1,))
    job = world.manager.job
    assert job.description is not None
    job.description = msgspec.structs.replace(job.description, last_save=9)
    chosen = CheckpointComplete(next_step=1, sequence=4, address="step-1")
    world.manager.handle("w0", chosen, 0.0)  # the job began from an older one than the newest
    for sequence in (8, 9):
        found = CheckpointComplete(next_step=1, sequence=sequence, address="another", is_found=True)
        world.manager.handle("w1", found, 0.0)
    assert job.checkpoint == chosen
    newer = CheckpointComplete(next_step=1, sequence=10, address="ours", is_found=True)
    world.manager.handle("w1", newer, 0.0)
    assert job.checkpoint == newer


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
