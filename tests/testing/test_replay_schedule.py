"""Traces made small and quick."""

from __future__ import annotations

import pytest

from varuna.errors import ConfigError
from varuna.plan.fleet_trace import FleetChange, FleetTrace, parse_trace
from varuna.testing.replay_schedule import counts_of, num_at_start, scaled

TRACE = parse_trace("0,10\n60000,20\n120000,12\n180000,12\n240000,3\n300000,0\n360000,8\n", "fleet.csv")


def test_counts_are_scaled_by_the_most_of_the_part_and_time_by_the_speed() -> None:
    made = scaled(TRACE, max_workers=4, from_s=60, until_s=300, speed=60)
    assert counts_of(made) == ((0.0, 4), (1.0, 2), (3.0, 1))
    assert made.end_s == 4.0
    assert num_at_start(made) == 4
    names = [change.removed for change in made.changes]
    assert names == [(), ("machine-0", "machine-1"), ("machine-2",)]


def test_a_part_begins_with_who_is_there() -> None:
    made = scaled(TRACE, max_workers=20, from_s=90, speed=1)
    assert counts_of(made) == ((0.0, 20), (30.0, 12), (150.0, 3), (210.0, 1))  # what is at the end is not in it


def test_small_traces_stay_as_they_are() -> None:
    trace = FleetTrace(
        name="small",
        changes=(
            FleetChange(time_s=0.0, added=("a", "b", "c")),
            FleetChange(time_s=5.0, removed=("b",)),
            FleetChange(time_s=6.0, added=("d",), removed=("a",)),
        ),
        end_s=9.0,
    )
    assert counts_of(scaled(trace, max_workers=6)) == ((0.0, 3), (5.0, 2))


def test_there_are_never_fewer_than_the_least() -> None:
    made = scaled(TRACE, max_workers=4, min_workers=2, speed=60)
    assert [count for _, count in counts_of(made)] == [2, 4, 2]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"from_s": 200.0, "until_s": 100.0}, "no part from 200 to 100 s"),
        ({"until_s": 400.0}, "ends at 360 s"),
        ({"min_workers": 5}, "5 to 4 workers cannot be"),
        ({"min_workers": 0}, "0 to 4 workers cannot be"),
        ({"speed": 0.0}, "speed=0 must be above 0"),
    ],
)
def test_what_cannot_be_is_refused(options: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        scaled(TRACE, max_workers=4, **options)  # type: ignore[arg-type]
