"""The supervisor is pure: events and times in, signals and an outcome out."""

from __future__ import annotations

import signal

import pytest

from varuna.failure import FailurePlace, FailureRecord
from varuna.launch.supervise import MAX_ENDING_S, Outcome, Supervisor


def record(worker_index: int, at_s: float, *, is_root_cause: bool = True, exit_code: int = 1) -> FailureRecord:
    return FailureRecord(
        worker_index=worker_index,
        host="here",
        at_s=at_s,
        error_type="ValueError" if is_root_cause else "PeerLost",
        error_text="bad",
        traceback_text="Traceback ...",
        place=FailurePlace(),
        is_root_cause=is_root_cause,
        exit_code=exit_code,
    )


def running(num_workers: int) -> Supervisor:
    supervisor = Supervisor(num_workers)
    for worker_index in range(num_workers):
        supervisor.worker_started(worker_index)
    return supervisor


def signals_until_done(supervisor: Supervisor, now_s: float) -> list[tuple[float, int, str]]:
    """What an ending sends to workers that never listen, with the time of each."""
    sent = []
    while (wait_s := supervisor.wait_s(now_s)) is not None:
        now_s += wait_s
        sent += [(now_s, due.worker_index, due.signum.name) for due in supervisor.due_signals(now_s)]
    return sent


def test_all_ending_well_is_success() -> None:
    supervisor = running(2)
    supervisor.worker_exited(0, 0, 1.0, 1.0)
    assert not supervisor.is_done
    assert supervisor.wait_s(1.0) is None  # nothing is due: it may go on for days
    supervisor.worker_exited(1, 0, 9e5, 9e5)
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 0
    assert supervisor.outcome().root is None


def test_a_failure_escalates_to_those_alive() -> None:
    supervisor = running(3)
    supervisor.worker_exited(0, 0, 5.0, 5.0)
    supervisor.worker_failed(record(1, 10.0), 10.0)
    supervisor.worker_exited(1, 1, 10.1, 10.1)
    assert signals_until_done(supervisor, 10.1) == [(11.5, 2, "SIGTERM"), (13.0, 2, "SIGKILL")]


@pytest.mark.parametrize(
    ("signum", "names"),
    [
        (signal.SIGINT, ["SIGINT", "SIGTERM", "SIGKILL"]),
        (signal.SIGTERM, ["SIGTERM", "SIGKILL"]),
        (signal.SIGHUP, ["SIGTERM", "SIGKILL"]),
    ],
)
def test_every_ending_is_bounded(signum: signal.Signals, names: list[str]) -> None:
    supervisor = running(1)
    supervisor.stop_requested(signum, 100.0)
    sent = signals_until_done(supervisor, 100.0)
    assert [name for _, _, name in sent] == names
    assert sent[0][0] == 100.0
    assert sent[-1][0] <= 100.0 + MAX_ENDING_S
    supervisor.worker_exited(0, -9, 103.6, 103.6)
    assert supervisor.outcome().exit_code == 128 + signum
    assert supervisor.outcome().root is None


def test_a_second_request_kills_at_once() -> None:
    supervisor = running(2)
    supervisor.stop_requested(signal.SIGINT, 0.0)
    supervisor.due_signals(0.0)
    supervisor.stop_requested(signal.SIGINT, 0.5)
    assert [due.signum for due in supervisor.due_signals(0.5)] == [signal.SIGKILL, signal.SIGKILL]


def test_a_stop_before_workers_start_is_done_at_once() -> None:
    supervisor = Supervisor(4)
    supervisor.stop_requested(signal.SIGINT, 0.0)
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 130


def test_a_worker_that_starts_while_the_job_ends_is_not_waited_for() -> None:
    supervisor = Supervisor(2)
    supervisor.worker_started(0)
    supervisor.worker_exited(0, 1, 0.0, 0.0)
    supervisor.worker_started(1)
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 1


def test_the_root_cause_is_the_earliest_failure_that_is_no_consequence() -> None:
    supervisor = running(4)
    supervisor.worker_failed(record(0, 1.0, is_root_cause=False), 1.0)
    supervisor.worker_failed(record(2, 1.2), 1.2)
    supervisor.worker_failed(record(1, 1.1, exit_code=3), 1.3)
    for worker_index in range(3):
        supervisor.worker_exited(worker_index, 1, 1.4, 1.4)
    supervisor.worker_exited(3, 0, 1.5, 1.5)
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert outcome.root.worker_index == 1
    assert outcome.exit_code == 3
    assert [end.worker_index for end in outcome.others] == [0, 2, 3]


def test_a_death_without_a_record_is_a_cause_unless_it_was_ordered() -> None:
    supervisor = running(3)
    supervisor.worker_failed(record(0, 1.0, is_root_cause=False), 1.0)
    supervisor.worker_exited(1, -9, 1.1, 1.1)
    supervisor.worker_exited(0, 1, 1.2, 1.2)
    [order] = supervisor.due_signals(2.6)
    assert (order.worker_index, order.signum) == (2, signal.SIGTERM)
    supervisor.worker_exited(2, -15, 2.61, 2.61)
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert (outcome.root.worker_index, outcome.exit_code) == (1, 137)
    assert outcome.others[1].stopped_by == signal.SIGTERM


def test_only_consequences_still_have_a_first() -> None:
    supervisor = running(2)
    supervisor.worker_failed(record(1, 1.0, is_root_cause=False), 1.0)
    supervisor.worker_failed(record(0, 2.0, is_root_cause=False), 2.0)
    for worker_index in range(2):
        supervisor.worker_exited(worker_index, 1, 2.1, 2.1)
    root = supervisor.outcome().root
    assert root is not None
    assert root.worker_index == 1


def test_a_lost_zygote_ends_all_and_a_lost_store_stops_them() -> None:
    supervisor = Supervisor(2)
    supervisor.worker_started(0)
    supervisor.zygote_lost(-9, 1.0)
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 1
    assert "signal 9" in supervisor.outcome().lost
    supervisor = running(1)
    supervisor.store_lost(1.0)
    assert signals_until_done(supervisor, 1.0) == [(2.5, 0, "SIGTERM"), (4.0, 0, "SIGKILL")]


def test_a_record_is_news_once() -> None:
    supervisor = running(1)
    assert supervisor.worker_failed(record(0, 1.0), 1.0)
    assert not supervisor.worker_failed(record(0, 1.0), 1.1)


# --- a job with a manager -------------------------------------------------------------------


def managed(num_workers: int) -> Supervisor:
    supervisor = Supervisor(num_workers, is_managed=True)
    for worker_index in range(num_workers):
        supervisor.worker_started(worker_index)
    return supervisor


def test_with_a_manager_a_lost_store_stops_nobody() -> None:
    supervisor = managed(2)
    supervisor.store_lost(1.0)
    assert not supervisor.is_ending
    for worker_index in range(2):
        supervisor.worker_exited(worker_index, 0, 2.0, 2.0)
    assert (supervisor.outcome().exit_code, supervisor.outcome().lost) == (0, "")


def test_managed_jobs_survive_deaths_by_signals() -> None:
    supervisor = managed(3)
    assert supervisor.worker_exited(1, -9, 1.0, 1.0)
    assert supervisor.wait_s(1.0) is None
    supervisor.worker_exited(0, 0, 2.0, 2.0)
    supervisor.worker_exited(2, 0, 3.0, 3.0)
    assert supervisor.is_done
    assert supervisor.outcome() == Outcome(exit_code=0, others=supervisor.outcome().others)
    assert [end.worker_index for end in supervisor.outcome().others] == [0, 2]


def test_a_managed_job_whose_last_worker_is_killed_has_failed() -> None:
    supervisor = managed(2)
    assert supervisor.worker_exited(1, -9, 1.0, 1.0)
    assert not supervisor.worker_exited(0, -11, 2.0, 2.0)
    assert supervisor.is_done
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert (outcome.root.worker_index, outcome.exit_code) == (0, 139)


def test_an_exception_or_an_exit_code_of_a_founder_ends_a_managed_job() -> None:
    supervisor = managed(3)
    supervisor.worker_exited(2, -9, 1.0, 1.0)
    supervisor.worker_failed(record(1, 5.0), 5.0)
    assert not supervisor.worker_exited(1, 1, 5.1, 5.1)
    assert signals_until_done(supervisor, 5.1) == [(6.5, 0, "SIGTERM"), (8.0, 0, "SIGKILL")]
    supervisor.worker_exited(0, -15, 6.6, 6.6)
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert (outcome.root.worker_index, outcome.exit_code) == (1, 1)
    assert [end.worker_index for end in outcome.others] == [0]  # 2 is long forgotten
    supervisor = managed(2)
    assert not supervisor.worker_exited(1, 4, 1.0, 1.0)
    assert supervisor.wait_s(1.0) is not None


def test_a_newcomer_that_fails_ends_nothing_unless_the_manager_says_so() -> None:
    supervisor = managed(1)
    assert supervisor.worker_added(1)
    assert not supervisor.is_done
    supervisor.worker_started(1)
    assert supervisor.worker_failed(record(1, 2.0), 2.0)
    assert supervisor.worker_exited(1, 1, 2.1, 2.1)
    assert supervisor.wait_s(2.1) is None
    supervisor.job_failed("w1 failed: ValueError: bad", 2.2)
    assert supervisor.wait_s(2.2) == pytest.approx(1.5)
    supervisor.worker_exited(0, 0, 2.3, 2.3)
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert (outcome.root.worker_index, outcome.exit_code, outcome.lost) == (1, 1, "")


def test_the_managers_reason_is_told_beside_the_death_that_led_to_it() -> None:
    supervisor = managed(3)
    supervisor.worker_exited(1, -9, 1.0, 1.0)
    supervisor.worker_exited(2, -9, 7.0, 7.0)
    supervisor.job_failed("no worker is left that holds section 3", 7.1)
    supervisor.worker_exited(0, 0, 7.2, 7.2)
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert (outcome.root.worker_index, outcome.exit_code) == (2, 137)
    assert outcome.lost == "the job cannot go on: no worker is left that holds section 3."


def test_a_death_at_the_start_is_the_cause_of_the_connections_it_breaks() -> None:
    supervisor = managed(2)
    assert supervisor.worker_exited(1, -9, 1.0, 1.0)
    supervisor.worker_failed(record(0, 1.2, is_root_cause=False), 1.2)
    supervisor.worker_exited(0, 1, 1.3, 1.3)
    outcome = supervisor.outcome()
    assert outcome.root is not None
    assert (outcome.root.worker_index, outcome.exit_code) == (1, 137)


def test_nobody_joins_a_job_that_ends() -> None:
    supervisor = managed(1)
    supervisor.stop_requested(signal.SIGINT, 1.0)
    assert not supervisor.worker_added(1)
    supervisor.worker_exited(0, 130, 1.1, 1.1)
    assert supervisor.is_done
    assert not supervisor.worker_added(1)


@pytest.mark.parametrize(("died_s", "ends"), [(95.0, True), (10.0, False)])
def test_without_a_manager_deaths_end_the_job_again(died_s: float, ends: bool) -> None:
    supervisor = managed(3)
    supervisor.worker_exited(2, -9, died_s, died_s)
    supervisor.manager_lost("the manager is gone.", 100.0)
    assert supervisor.is_ending is ends
    supervisor.worker_exited(1, -9, 101.0, 101.0)
    assert supervisor.is_ending


# --- one of several machines ----------------------------------------------------------------


def staying(*founders: int) -> Supervisor:
    supervisor = Supervisor(0, is_managed=True, stays=True)
    for worker_index in founders:
        assert supervisor.worker_added(worker_index, founds=True)
        supervisor.worker_started(worker_index)
    return supervisor


def test_a_machine_without_workers_stays_until_the_job_is_over() -> None:
    supervisor = staying(4, 5)
    assert supervisor.worker_exited(4, -9, 1.0, 1.0)
    supervisor.worker_exited(5, 0, 2.0, 2.0)
    assert not supervisor.is_done
    assert supervisor.wait_s(3.0) is None
    assert supervisor.worker_added(6)
    supervisor.worker_started(6)
    supervisor.job_ended()
    assert not supervisor.worker_added(7)
    assert not supervisor.is_done  # its script may have something left to do
    supervisor.worker_exited(6, -9, 5.0, 5.0)
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 0


def test_its_exit_code_is_the_jobs() -> None:
    supervisor = staying(0)
    supervisor.job_failed("b.0 failed: KeyError: 'x'", 1.0, 7)
    assert signals_until_done(supervisor, 1.0) == [(2.5, 0, "SIGTERM"), (4.0, 0, "SIGKILL")]
    supervisor.worker_exited(0, -15, 2.6, 2.6)
    assert supervisor.is_done
    outcome = supervisor.outcome()
    assert (outcome.exit_code, outcome.lost) == (7, "the job cannot go on: b.0 failed: KeyError: 'x'.")


def test_a_failure_here_waits_a_moment_for_the_managers_word() -> None:
    supervisor = staying(0)
    supervisor.worker_failed(record(0, 1.0, exit_code=3), 1.0)
    supervisor.worker_exited(0, 3, 1.1, 1.1)
    assert not supervisor.is_done
    assert supervisor.due_signals(2.5) == []
    assert not supervisor.is_done
    assert supervisor.due_signals(4.0) == []
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 3


def test_told_to_leave_it_has_its_grace_and_no_more() -> None:
    supervisor = staying(0, 1)
    assert supervisor.leave(signal.SIGTERM, 30.0, 10.0)
    assert supervisor.wait_s(10.0) == 30.0
    assert not supervisor.worker_added(2)
    supervisor.worker_exited(0, 0, 12.0, 12.0)
    assert [due.signum for due in supervisor.due_signals(40.0)] == [signal.SIGKILL]
    supervisor.worker_exited(1, -9, 40.1, 40.1)
    assert supervisor.is_done
    assert supervisor.outcome().exit_code == 143
    again = staying(0)
    again.leave(signal.SIGINT, 30.0, 0.0)
    assert not again.leave(signal.SIGINT, 30.0, 1.0)
    again.stop_requested(signal.SIGINT, 1.0)
    assert [due.signum for due in again.due_signals(1.0)] == [signal.SIGKILL]
    idle = staying()
    idle.leave(signal.SIGTERM, 30.0, 0.0)
    assert idle.is_done
