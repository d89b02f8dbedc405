"""The manager's state machine where several things go wrong, or messages are lost or late."""

from __future__ import annotations

import pytest

from tests.morph.steering import check_done, halted, run, sent, started, told
from tests.morph.world import World
from tests.morph.world_parts import DESCRIBED, planner
from varuna.morph.instructions import Send
from varuna.morph.messages import (
    Abort,
    Formed,
    Halted,
    InScript,
    JobEnded,
    Leave,
    LeaveAsked,
    Pause,
    Ready,
    StopWorker,
    WorkerExited,
    WorkerStarted,
)
from varuna.morph.phases import Phase
from varuna.morph.policy import Policy
from varuna.morph.record import WorkerStatus
from varuna.morph.state import Manager


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


def test_worker_0_is_killed_before_its_manager_has_heard_of_the_job() -> None:
    world = World(3, stages=(1,))
    first = world.workers["w0"]
    first.outbox.clear()
    run(world, lambda: all(worker.mode == "running" for worker in world.workers.values()))
    first.outbox.clear()
    assert world.manager.job.phase is Phase.FOUNDING
    world.kill(first)
    check_done(world)
    assert world.manager.job.generation.members == ("w1", "w2")


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


def test_a_script_in_code_of_its_own_is_waited_for() -> None:
    world = started(4, policy=Policy(halt_limit_s=5.0))
    world.kill(world.workers["w1"])
    for name in ("w2", "w3"):
        world.freeze(world.workers[name])
    run(world, lambda: not world.actions())
    number = world.manager.job.generation.number
    world.deliver("w2", InScript(generation=number - 1, is_there=True))  # it is late
    world.deliver("w3", InScript(generation=number, is_there=True))
    world.deliver("w3", InScript(generation=number, is_there=True))
    world.advance(5.5)
    assert world.manager.job.workers["w2"].is_fenced
    world.advance(1000.0)
    assert world.manager.job.phase is Phase.ENDING
    assert not world.manager.job.workers["w3"].is_fenced
    world.deliver("w3", InScript(generation=number, is_there=False))
    world.advance(4.5)
    assert not world.manager.job.workers["w3"].is_fenced
    world.workers["w3"].frozen = False
    check_done(world)
    assert not world.manager.job.workers["w3"].is_fenced
    assert len(told(world, "in script")) == 1


def test_who_comes_back_from_its_script_and_does_not_report_is_fenced() -> None:
    world = started(4, policy=Policy(halt_limit_s=5.0))
    world.kill(world.workers["w1"])
    world.freeze(world.workers["w3"])
    run(world, lambda: not world.actions())
    number = world.manager.job.generation.number
    world.deliver("w3", InScript(generation=number, is_there=True))
    world.advance(100.0)
    world.deliver("w3", InScript(generation=number, is_there=False))
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
    run(world, lambda: world.workers["w2"].mode == world.workers["w1"].mode == "finished")
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


@pytest.mark.parametrize(
    ("deadline_s", "within"),
    [(0, ""), (0.1, " within 0.1 s"), (9.64, " within 9.6 s"), (29.97, " within 30 s"), (119, " within 119 s")],
)
def test_what_is_left_of_a_grace_is_told_in_round_numbers(deadline_s: float, within: str) -> None:
    world = started(3, stages=(1,), num_steps=8)
    world.deliver("m0", LeaveAsked(incarnation="w2", deadline_s=deadline_s, source="test"))
    assert told(world, "notice") == [f"w2 is asked to leave{within} (test)"]


def test_members_that_connect_late_tell_their_newest_state_first() -> None:
    """A manager that comes up when the first generation is over already still learns of its plan."""
    plan_for = planner(1, (1,))
    manager = Manager(plan_for)
    plan = plan_for(2, DESCRIBED).plan
    for rank in range(2):
        manager.handle("agent", WorkerStarted(incarnation=f"w{rank}", machine="m", rank=rank), 0.0)
    manager.handle("agent", WorkerExited(incarnation="w1", code=-9), 0.0)
    manager.handle("w0", DESCRIBED, 0.1)
    manager.handle("w0", Halted(report=halted(0, 1)), 0.1)
    assert manager.job.phase is Phase.FOUNDING
    manager.handle("w0", Formed(generation=0, plan=plan), 0.1)
    assert manager.job.phase is Phase.FORMING
    assert manager.job.generation.members == ("w0",)


def test_a_founder_that_is_to_leave_before_its_agent_has_told_of_it_hands_over_first() -> None:
    """It may hold what nobody else has. All are at work by then; only their agent was slow to connect."""
    plan_for = planner(1, (1,))
    manager = Manager(plan_for)
    plan = plan_for(2, DESCRIBED).plan
    manager.handle("w0", DESCRIBED, 0.0)
    for name in ("w0", "w1"):
        manager.handle(name, Formed(generation=0, plan=plan), 0.0)
    said = [*manager.handle("", LeaveAsked(incarnation="w1", source="test"), 0.1)]
    assert manager.job.phase is Phase.FOUNDING
    for rank in range(2):
        started = WorkerStarted(incarnation=f"w{rank}", machine="m", rank=rank)
        said += manager.handle("agent", started, 0.2)
    assert manager.job.phase is Phase.PAUSING
    assert [one.message for one in said if isinstance(one, Send)] == [Pause(generation=0)] * 2
    assert manager.job.workers["w1"].status is WorkerStatus.MEMBER


def test_a_newcomer_that_is_to_leave_before_its_agent_has_told_of_it_leaves() -> None:
    manager = Manager(planner(1, (1,)))
    manager.handle("w2", Ready(digest="d", store_address="a"), 0.0)
    asked = manager.handle("", LeaveAsked(incarnation="w2", source="test"), 0.1)
    assert not [one for one in asked if isinstance(one, Send)]
    said = manager.handle("agent", WorkerStarted(incarnation="w2", machine="m"), 0.2)
    leave = Leave(reason="it was asked to leave before it had joined")
    assert [*said] == [Send(recipient="w2", message=leave)]
