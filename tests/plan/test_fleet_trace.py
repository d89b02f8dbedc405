"""Traces of fleets: what is read from each format, and what is said about what cannot be read."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from varuna.errors import ConfigError
from varuna.plan.fleet_trace import FleetChange, parse_trace, read_trace

TRACES = Path(
    os.environ.get("VARUNA_TRACES") or Path(__file__).parent.parent.parent.parent / "shared" / "traces"
)


def test_events_begin_at_the_first_line_and_join_by_moment() -> None:
    trace = parse_trace("1000,add,a\r\n1000, add , b\r\n\r\n3500,remove,a\r\n9000,add,c\r\n", "t")
    assert trace.changes == (
        FleetChange(time_s=0, added=("a", "b")),
        FleetChange(time_s=2.5, removed=("a",)),
        FleetChange(time_s=8, added=("c",)),
    )
    assert trace.end_s == 8


def test_a_node_that_leaves_and_returns_in_one_moment_is_in_both() -> None:
    trace = parse_trace("0,add,a\n5000,remove,a\n5000,add,a\n5000,add,b\n5000,remove,b\n9000,remove,a\n", "t")
    assert trace.changes[1] == FleetChange(time_s=5, added=("a",), removed=("a",))


def test_counts_are_first_in_first_out() -> None:
    trace = parse_trace("0,3\n60000,3\n120000,1\n120000,2\n180000,4", "t")
    assert trace.changes == (
        FleetChange(time_s=0, added=("machine-0", "machine-1", "machine-2")),
        FleetChange(time_s=120, removed=("machine-0",)),
        FleetChange(time_s=180, added=("machine-3", "machine-4")),
    )


def test_json_counts_last_for_their_tick() -> None:
    trace = parse_trace('{"metadata": {"gap_seconds": 600, "zone": "x"}, "data": [2, 2, 3]}\n', "t")
    assert trace.changes == (
        FleetChange(time_s=0, added=("machine-0", "machine-1")),
        FleetChange(time_s=1200, added=("machine-2",)),
    )
    assert trace.end_s == 1800


@pytest.mark.parametrize(
    ("text", "line", "reason"),
    [
        ("", 1, "empty"),
        ("\n \n", 1, "empty"),
        ("0", 1, "1 fields"),
        ("0,add,a,b", 1, "4 fields"),
        ("0,add,a\n\n5,7", 3, "2 fields"),
        ("0,add,a\n\n5000,remove,b\n", 3, "'b' is removed, but it is not there"),
        ("0,add,a\n1,add,a\n", 2, "already there"),
        ("0,add,a\n1,drop,a\n", 2, "'drop' is neither add nor remove"),
        ("0,add,\n", 1, "no name"),
        ("soon,add,a\n", 1, "'soon' is not a whole number"),
        ("1.5,3\n", 1, "'1.5' is not a whole number"),
        ("²,3\n", 1, "'²' is not a whole number"),
        ("9" * 5000 + ",3\n", 1, "not a whole number"),
        ("5,3\n4,3\n", 2, "time goes back, from 5 to 4 ms"),
        ("0,3\n5,-1\n", 2, "'-1' is not a whole number from 0"),
        ("0,3\n5,many\n", 2, "'many' is not"),
        ("0,3\n5,999999999\n", 2, "from 0 to 100,000"),
        ("0,3\n", 1, "ends where it begins"),
        ("0,add,a\n0,add,b\n", 2, "ends where it begins"),
        ("[1, 2]", 1, "another shape"),
        ('{"data": [1]}', 1, "another shape"),
        ('{"metadata": {"gap_seconds": 5}, "data": {"0": 1}}', 1, "another shape"),
        ('{"metadata": {\n"gap_seconds": 0}, "data": [1]}', 2, "not a positive number"),
        ('{"metadata": {\n"gap_seconds": true}, "data": [1]}', 2, "not a positive number"),
        ('{"metadata": {"gap_seconds": 5},\n"data": []}', 2, "empty"),
        ('{"metadata": {"gap_seconds": 5}, "data": [\n1,\n2,\n-3]}', 4, "data[2] is -3"),
        ('{"metadata": {"gap_seconds": 5}, "data": [\n1,\n2.5]}', 3, "data[1] is 2.5"),
        ('{"metadata": {"gap_seconds": 5}, "data": [true]}', 1, "data[0] is true"),
        ('{"metadata": {"gap_seconds": 5},\n"data": [1, 2', 2, "not JSON"),
    ],
)
def test_malformed(text: str, line: int, reason: str, tmp_path: Path) -> None:
    path = tmp_path / "fleet.csv"
    path.write_text(text, encoding="utf-8")
    with pytest.raises(ConfigError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}, line {line}: "), caught.value
    assert reason in str(caught.value)


def test_unreadable_files(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"missing.csv: No such file"):
        read_trace(tmp_path / "missing.csv")
    path = tmp_path / "binary.csv"
    path.write_bytes(b"0,add,a\n1,add,\xff\n")
    with pytest.raises(ConfigError, match="line 2: not text"):
        read_trace(path)


@given(st.lists(st.tuples(st.integers(0, 10_000), st.integers(0, 20)), min_size=2))
def test_counts_come_back(moments: list[tuple[int, int]]) -> None:
    moments.sort(key=lambda moment: moment[0])
    if moments[0][0] == moments[-1][0]:
        return
    trace = parse_trace("".join(f"{time},{count}\n" for time, count in moments), "t")
    present: set[str] = set()
    wanted = dict(moments)
    for change in trace.changes:
        assert present.issuperset(change.removed)
        present.difference_update(change.removed)
        assert not present.intersection(change.added)
        present.update(change.added)
        assert len(present) == wanted[round(change.time_s * 1000) + moments[0][0]]
    assert len(present) == moments[-1][1]


@pytest.mark.skipif(not TRACES.is_dir(), reason="real traces are not part of the source tree")
@pytest.mark.parametrize(
    ("name", "adds", "removals", "end_s"),
    [("bamboo-p3-48nodes.csv", 177, 167, 40920), ("bamboo-g4dn.csv", 79, 74, 38280)],
)
def test_real_traces(name: str, adds: int, removals: int, end_s: float) -> None:
    trace = read_trace(TRACES / name)
    assert sum(len(change.added) for change in trace.changes) == adds
    assert sum(len(change.removed) for change in trace.changes) == removals
    assert trace.end_s == end_s
