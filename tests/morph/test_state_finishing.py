"""Scripts that are over: everybody stays until all are, and what is lost in the last step is mended."""

from __future__ import annotations

from tests.morph.steering import check_done, members, run, sent, started, told
from tests.morph.world import World
from varuna.morph.messages import Leave
from varuna.morph.phases import Phase
from varuna.morph.policy import Policy
from varuna.morph.record import WorkerStatus


def finish(world: World, *names: str) -> None:
    """The scripts of some come to their end, the others are at their last step or through it."""
    run(world, lambda: len(world.ledger) == world.num_steps)
    for name in names:
        worker = world.workers[name]
        while worker.mode != "finished":
            actions = world._own_actions(worker)
            assert actions, worker
            actions[0]()
        while worker.outbox:
            world._deliver_worker(worker)


def test_nobody_leaves_before_all_have_finished() -> None:
    world = started(3, stages=(1,))
    finish(world, "w1", "w2")
    assert world.manager.job.phase is Phase.FINISHING
    assert sent(world, Leave) == []
    assert all(worker.is_alive for worker in world.workers.values())
    finish(world, "w0")
    assert world.manager.job.phase is Phase.DONE
    assert sent(world, Leave) == ["w0", "w1", "w2"]
    check_done(world)


def test_one_that_has_finished_helps_those_that_have_not() -> None:
    """2 pipelines of 2 stages; w2 has finished and is the only one left with the second stage's sections."""
    world = started(4, stages=(2,))
    held = {name: set(worker.versions) for name, worker in world.workers.items()}
    (partner,) = (name for name in ("w2", "w3") if not held[name] & held["w0"])
    finish(world, partner)
    lost = [name for name in ("w1", "w2", "w3") if held[name] & held[partner] and name != partner]
    for name in lost:
        world.kill(world.workers[name])
    run(world, lambda: world.manager.job.generation.number == 1)
    assert partner in members(world)
    check_done(world)


def test_worker_0_is_lost_when_all_others_have_finished() -> None:
    world = started(3, stages=(1,))
    finish(world, "w1", "w2")
    world.kill(world.workers["w0"])
    world.drain()
    assert world.manager.job.phase is Phase.FAILED
    assert world.manager.job.reason == "worker 0 was lost after the last step, before its script had ended"
    assert not any(worker.is_alive for worker in world.workers.values())


def test_worker_0_may_go_when_it_has_finished() -> None:
    world = started(3, stages=(1,))
    finish(world, "w0")
    world.kill(world.workers["w0"])
    check_done(world)


def test_who_has_not_finished_follows_worker_0() -> None:
    """w0 dies in the last step: of the others, one that still has to save becomes worker 0."""
    world = started(3, stages=(1,))
    run(world, lambda: len(world.ledger) == world.num_steps - 1 and world.workers["w0"].reduced)
    run(world, lambda: world.workers["w1"].num_seen == world.num_steps)
    finish(world, "w1")
    if world.workers["w0"].num_seen < world.num_steps and world.workers["w2"].num_seen < world.num_steps:
        world.kill(world.workers["w0"])
        run(world, lambda: world.manager.job.generation.number == 1)
        assert members(world) == ["w2", "w1"]
    check_done(world)


def test_no_newcomer_is_taken_when_a_script_is_over() -> None:
    world = started(3, stages=(1,))
    finish(world, "w1")
    for name in ("w0", "w2"):
        world.freeze(world.workers[name])
    world.join()
    run(world, lambda: bool(world.manager.job.with_status(WorkerStatus.READY)))
    world.kill(world.workers["w2"])
    world.workers["w0"].frozen = False
    check_done(world)
    assert world.workers["w3"].num_applied == 0


def test_a_manager_that_was_started_again_hears_who_has_finished() -> None:
    world = started(3, stages=(1,))
    finish(world, "w1", "w2")
    world.restart()
    check_done(world)


def test_a_lost_worker_is_replaced_but_not_at_the_end() -> None:
    world = started(3, stages=(1,), num_steps=9, policy=Policy(replace_lost=True))
    world.kill(world.workers["w1"])
    run(world, lambda: "w3" in world.workers)
    assert told(world, "adding")[0].endswith(", for w1")
    finish(world, "w2")
    num_workers = len(world.workers)
    world.kill(world.workers["w2"])
    check_done(world)
    assert len(world.workers) == num_workers


def test_newcomers_that_are_lost_one_after_the_other_are_not_replaced_for_ever() -> None:
    world = started(3, stages=(1,), num_steps=50, policy=Policy(replace_lost=True))
    world.kill(world.workers["w1"])
    for name in ("w3", "w4", "w5"):
        run(world, lambda name=name: name in world.manager.job.workers)  # type: ignore[misc]
        world.kill(world.workers[name])
    run(world, lambda: "3 newcomers were lost one after the other: no more come" in told(world, "lost"))
    assert len(world.workers) == 6
    check_done(world)
