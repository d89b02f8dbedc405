"""Where a replayed job's time went, from events that are written down here."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from varuna.errors import RunError
from varuna.morph.views import LoggedEvent
from varuna.plan.fleet_result import Activity
from varuna.testing.replay_account import ReplayResult, account
from varuna.testing.replay_report import render_replay, replay_values

BATCH = 10
TIMES = {"stood_s": 0.5, "stop_s": 0.1, "decide_s": 0.0, "reform_s": 0.2, "transfer_s": 0.1, "rebuild_s": 0.1}


class Log:
    """Events of a job, at seconds since it began."""

    def __init__(self) -> None:
        self.events: list[LoggedEvent] = []
        self.num_steps = 0

    def add(self, at_s: float, kind: str, step_index: int | None = None, **figures: float) -> None:
        self.events.append(
            LoggedEvent(
                number=len(self.events) + 1,
                at=datetime.fromtimestamp(1e9 + at_s, UTC).isoformat(timespec="milliseconds"),
                kind=kind,
                text="",
                generation=0,
                step_index=step_index,
                figures=figures,
            )
        )

    def running(self, at_s: float, members: int) -> None:
        times = TIMES if self.events else {}
        self.add(at_s, "running", members=float(members), workers=float(members), **times)

    def steps(self, *at_s: float) -> None:
        for moment in at_s:
            self.add(moment, "step", self.num_steps)
            self.num_steps += 1

    def account(self, duration_s: float, *counts: tuple[float, int]) -> ReplayResult:
        result = account("fleet", self.events, counts, duration_s=duration_s, batch_size=BATCH)
        assert sum(result.wall_s.values()) == pytest.approx(duration_s)
        assert sum(result.lost.values()) == pytest.approx(result.ideal_samples - result.samples)
        return result


def test_undisturbed() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1, 2, 3, 4)
    result = log.account(4.5, (0.0, 4))
    assert (result.num_steps, result.samples) == (4, 40)
    assert result.step_s == {4: pytest.approx(1.0)}
    assert result.ideal_samples == pytest.approx(45)
    assert result.wall_s[Activity.UNFINISHED] == pytest.approx(0.5)
    assert result.lost["unfinished"] == pytest.approx(5)
    assert result.goodput == pytest.approx(40 / 45)


def test_a_sudden_death() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1, 2)
    log.add(2.5, "lost")
    log.add(2.5, "ending")
    log.add(2.6, "forming")
    log.running(3, 3)
    log.steps(5, 7, 9)
    result = log.account(9, (0.0, 4), (2.5, 3))
    assert result.num_steps == 5
    assert result.step_s == {4: pytest.approx(1.0), 3: pytest.approx(2.0)}
    assert result.wall_s[Activity.REDONE] == pytest.approx(0.5)
    assert result.wall_s[Activity.MORPH] == pytest.approx(0.5)
    assert result.ideal_samples == pytest.approx(25 + 6.5 * 5)
    assert result.lost["redone"] == pytest.approx(5)
    assert result.lost["morph"] == pytest.approx(2.5)
    assert result.lost["not in use"] == pytest.approx(0)
    assert [morph["stood_s"] for morph in result.morphs] == [0.5]


def test_the_step_counts_if_its_commit_had_returned() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1, 2)
    log.add(2.9, "ending")
    log.steps(3)
    log.add(3, "forming")
    log.running(3.5, 3)
    log.steps(4.5, 5.5)
    result = log.account(5.5, (0.0, 4))
    assert result.num_steps == 5
    assert result.wall_s[Activity.REDONE] == 0
    assert result.wall_s[Activity.MORPH] == pytest.approx(0.6)


def test_a_notice_and_a_newcomer() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1, 2)
    log.add(2, "forming")
    log.running(2.5, 3)
    log.add(4, "adding", count=1)
    log.steps(4.5, 6.5)
    log.add(6.25, "ready")
    log.add(6.5, "forming")
    log.running(7, 4)
    log.steps(8, 9)
    result = log.account(9, (0.0, 4), (3.0, 3), (6.0, 4))
    assert result.num_steps == 6
    assert result.wall_s[Activity.MORPH] == pytest.approx(1.0)
    assert result.lost["not in use"] == pytest.approx(5 * 0.5 + 5 * 0.5)  # gone 0.5 s early, 0.5 s too late
    assert result.lost["slower steps"] == pytest.approx(0)
    assert result.starts_s == (2.25,)
    assert "a newcomer was ready after 2.2 s (median of 1)" in render_replay(result)


def test_waiting_and_going_back() -> None:
    log = Log()
    log.running(0, 2)
    log.steps(1, 2, 3)
    log.add(3.5, "ending")
    log.add(3.5, "waiting")
    log.add(5, "undone", first_step=1.0)
    log.add(5, "forming")
    log.running(5.5, 2)
    log.num_steps = 1
    log.steps(6.5, 7.5, 8.5)
    result = log.account(8.5, (0.0, 2))
    assert result.num_steps == 4
    assert result.wall_s[Activity.WAITING] == pytest.approx(1.5)
    assert result.wall_s[Activity.REDONE] == pytest.approx(2.5)


def test_a_number_of_workers_that_was_never_undisturbed_has_the_pace_of_the_nearest() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1, 2)
    log.add(2, "forming")
    log.running(2.5, 2)
    result = log.account(4, (0.0, 4), (2.0, 2))
    assert result.step_s == {4: pytest.approx(1.0)}
    assert result.ideal_samples == pytest.approx(20 + 2 * 5)


def test_without_two_steps_there_is_no_pace() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1)
    with pytest.raises(RunError, match=r"undisturbed in 2\.0 s"):
        log.account(2, (0.0, 4))


def test_the_table() -> None:
    log = Log()
    log.running(0, 4)
    log.steps(1, 2)
    log.add(2.5, "ending")
    log.add(2.6, "forming")
    log.running(3, 3)
    log.steps(5, 7, 9)
    result = log.account(10, (0.0, 4), (2.5, 3))
    assert render_replay(result) == TABLE
    values = replay_values(result)
    assert values["goodput"] == result.goodput
    assert sum(values["wall_s"].values()) == pytest.approx(10)


TABLE = """\
fleet: 3 to 4 workers in 10.0 s, 1 changes
50 samples in 5 steps; goodput 80.0% of the 62 samples that changes which cost nothing would give
usual step in seconds, by workers: 3: 2.00, 4: 1.00

                                             seconds   samples lost
training that counts                             8.0
  workers not in use yet, or not any more                      0.0%
  steps longer than the usual one                              0.0%
re-planning                                      0.5           4.0%
steps lost and done again                        0.5           8.0%
waiting for enough workers                       0.0           0.0%
the step under way at the end                    1.0           8.0%
all                                             10.0          20.0%

1 generations after the first; median pause 0.50 s (stop 0.10, decide 0.00, re-form 0.20, transfer 0.10, \
rebuild 0.10), longest 0.50 s
"""
