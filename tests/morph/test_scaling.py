"""When a job asks for machines: what it knows goes in, and the time; a call comes out, or none."""

from __future__ import annotations

import pytest

from tests.morph.test_gathering import SETTLE_S, form, found, gathering
from varuna.generations import HaltReport
from varuna.morph.messages import (
    AgentLost,
    Finished,
    LeaveAsked,
    LeaveWithdrawn,
    Offer,
    Ready,
    WorkerExited,
    WorkerLost,
    WorkerStarted,
)
from varuna.morph.phases import Phase
from varuna.morph.policy import Policy
from varuna.morph.scaling import Call, ScalePolicy, Scaling
from varuna.morph.state import Manager

NAMES = ["a.0.0", "a.1.0", "b.2.0", "b.3.0"]
SHORT_S, EVERY_S = 5.0, 60.0


def running() -> Manager:
    """A job of four workers, two each on a and b."""
    manager = gathering()
    found(manager)
    form(manager, NAMES)
    assert manager.job.phase is Phase.RUNNING
    return manager


def scaling(workers: int | None = None, min_workers: int = 3) -> Scaling:
    policy = ScalePolicy(workers=workers, settle_s=SHORT_S, every_s=EVERY_S)
    return Scaling("gpt-1", Policy(min_workers=min_workers, settle_s=SETTLE_S), policy)


def lose(manager: Manager, name: str, now_s: float) -> None:
    manager.handle(name.partition(".")[0], WorkerExited(incarnation=name, code=-9, failure=""), now_s)


def calls(asks: Scaling, manager: Manager, from_s: float, until_s: float) -> list[tuple[float, Call]]:
    """Those that are made if one looks every second, and when."""
    found: list[tuple[float, Call]] = []
    at_s = from_s
    while at_s < until_s:
        call = asks.look(manager.job, at_s)
        found += [] if call is None else [(at_s, call)]
        at_s += 1.0
    return found


def test_a_job_that_has_what_it_wants_asks_nobody() -> None:
    assert calls(scaling(), running(), 30, 1000) == []
    assert calls(scaling(workers=4), running(), 30, 1000) == []
    assert calls(scaling(workers=2), running(), 30, 1000) == []


def test_a_lost_worker_is_asked_for_and_again_while_nobody_comes() -> None:
    manager, asks = running(), scaling()
    assert asks.look(manager.job, 30) is None
    lose(manager, "b.3.0", 31)
    made = calls(asks, manager, 31, 31 + SHORT_S + 2 * EVERY_S + 1)
    assert [at_s for at_s, _ in made] == [36, 96, 156]
    assert made[0][1] == Call(
        run_id="gpt-1",
        workers_present=3,
        workers_wanted=4,
        why="3 of 4 workers are there: b.3.0 is gone: was ended by signal 9",
        phase="ending",
    )


def test_what_is_mended_at_once_is_not_asked_for() -> None:
    """As with --replace-lost: the newcomer counts as soon as its process runs."""
    manager, asks = running(), scaling()
    asks.look(manager.job, 30)
    lose(manager, "b.3.0", 31)
    assert asks.look(manager.job, 31) is None
    manager.handle("b", WorkerStarted(incarnation="b.4.1", machine="b"), 33)
    assert calls(asks, manager, 33, 500) == []
    lose(manager, "b.4.1", 500)
    assert [at_s for at_s, _ in calls(asks, manager, 500, 510)] == [505]


def test_a_machine_that_has_to_go_is_asked_for_while_it_is_there() -> None:
    manager, asks = running(), scaling()
    asks.look(manager.job, 30)
    manager.handle("b", LeaveAsked(machine="b", deadline_s=120, source="aws", event_id="1"), 31)
    [(at_s, call)] = calls(asks, manager, 31, 40)
    assert (at_s, call.workers_present, call.workers_wanted) == (36, 2, 4)
    assert call.why.endswith("b.3.0 leaves (aws)")


def test_a_notice_that_is_withdrawn_in_time_asks_nobody() -> None:
    manager, asks = running(), scaling()
    asks.look(manager.job, 30)
    manager.handle("b", LeaveAsked(machine="b", deadline_s=120, source="aws", event_id="1"), 31)
    asks.look(manager.job, 31)
    manager.handle("b", LeaveWithdrawn(machine="b", source="aws", event_id="1"), 33)
    assert calls(asks, manager, 33, 300) == []


def test_whom_a_person_sends_away_is_not_asked_for() -> None:
    """Unless a number is wanted, whatever happens."""
    manager, asks, firm = running(), scaling(), scaling(workers=4)
    for one in (asks, firm):
        one.look(manager.job, 30)
    manager.handle("b", LeaveAsked(incarnation="b.3.0", deadline_s=0, source="user"), 31)
    assert calls(asks, manager, 31, 300) == []
    assert [call.workers_present for _, call in calls(firm, manager, 31, 40)] == [3]
    manager.handle("a", WorkerStarted(incarnation="a.4.1", machine="a"), 300)  # the person adds one again
    assert calls(asks, manager, 300, 310) == []
    manager.handle("", WorkerLost(incarnation="a.1.0", reason="no sign of life"), 310)
    [(_, call)] = calls(asks, manager, 310, 320)
    assert (call.workers_present, call.workers_wanted) == (3, 4)


def test_more_than_there_ever_were_can_be_wanted() -> None:
    [(at_s, call)] = calls(scaling(workers=6), running(), 30, 40)
    assert (at_s, call.workers_present, call.workers_wanted) == (35, 4, 6)
    assert call.why == "4 of 6 workers are there: no more have come"


def test_a_job_that_has_not_begun_asks_for_those_it_waits_for() -> None:
    manager, asks = gathering(), scaling()
    assert [call.workers_present for _, call in calls(asks, manager, 0, 10)] == [0]
    manager.handle("a", Offer(num_workers=2), 10.0)
    [(at_s, call)] = calls(asks, manager, 10, 70)
    assert (at_s, call.workers_present, call.workers_wanted) == (65, 2, 3)
    assert call.why == "2 of 3 workers are there: 2 of at least 3 workers are offered"
    manager.handle("b", Offer(num_workers=2), 70.0)
    assert calls(asks, manager, 70, 75) == []
    manager.handle("", AgentLost(agent="b"), 75.0)
    assert [call.workers_present for _, call in calls(asks, manager, 76, 140)][:1] == [2]


def test_founders_that_are_on_the_way_are_not_asked_for() -> None:
    manager, asks = gathering(), scaling()
    manager.handle("a", Offer(num_workers=4), 1.0)
    assert manager.tick(20.0)
    assert manager.job.phase is Phase.FOUNDING
    assert calls(asks, manager, 20, 200) == []


def test_a_manager_that_was_started_again_knows_how_many_founded_the_job() -> None:
    manager = running()
    lose(manager, "b.3.0", 31)
    lose(manager, "b.2.0", 31)
    [(_, call)] = calls(scaling(), manager, 40, 50)
    assert (call.workers_present, call.workers_wanted) == (2, 4)


@pytest.mark.parametrize("ending", ["finishing", "failed"])
def test_a_job_that_ends_asks_nobody(ending: str) -> None:
    manager, asks = running(), scaling(workers=8)
    if ending == "finishing":
        report = HaltReport(
            generation=0,
            num_applied=9,
            reduced_step=None,
            committed_step=8,
            committed="",
            held_sections=(0,),
            reason="its script is over",
            is_finished=True,
        )
        manager.handle("a.0.0", Finished(report=report), 40)
        assert manager.job.phase is Phase.FINISHING
    else:
        manager.handle("b", WorkerExited(incarnation="b.3.0", code=1, failure="ValueError: x"), 40)
        assert manager.job.phase is Phase.FAILED
    assert calls(asks, manager, 41, 300) == []


def test_after_failures_it_asks_less_often_and_after_success_as_before() -> None:
    manager, asks = running(), scaling(workers=8)
    at_s, waits = 30.0, []
    for well in [False, False, False, False, False, False, True, False]:
        made_s = at_s
        while asks.look(manager.job, made_s) is None:
            made_s += 1.0
        waits.append(made_s - at_s)
        asks.answered(well=well, now_s=made_s)
        at_s = made_s + 1
    assert waits == [5, 119, 239, 479, 959, 959, 959, 59]


def test_who_waits_says_so() -> None:
    """All holders of what the job needs are left, but there are too few for a plan: it waits."""
    manager = gathering()
    found(manager)
    form(manager, NAMES)
    asks = scaling()
    asks.look(manager.job, 30)
    for name in ("a.1.0", "b.2.0", "b.3.0"):
        lose(manager, name, 31)
    [(_, call)] = calls(asks, manager, 31, 40)
    assert (call.workers_present, call.phase) == (1, manager.job.phase.value)


def test_newcomers_count_while_they_come() -> None:
    manager, asks = running(), scaling(workers=5)
    manager.handle("c", WorkerStarted(incarnation="c.0.1", machine="c"), 30)
    assert calls(asks, manager, 30, 60) == []
    manager.handle("c.0.1", Ready(digest="d"), 60)
    assert calls(asks, manager, 61, 90) == []
