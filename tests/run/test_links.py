"""Links and all-reduce between real processes: who measures what, figures that can be."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from tests.run.processes import Context, run_workers
from varuna.run.links import LinkMeasures, measure_links


def measure(context: Context, machines: list[int], most_bytes: int) -> Any:
    return msgspec.to_builtins(measure_links(context.world, machines, b"secret", most_bytes))


def measured(machines: list[int], most_bytes: int = 1) -> list[LinkMeasures]:
    found = run_workers(len(machines), measure, machines, most_bytes)
    return [msgspec.convert(each, type=LinkMeasures) for each in found]


def test_two_workers_of_one_machine() -> None:
    first, second = measured([0, 0], most_bytes=1 << 20)
    assert second == LinkMeasures()  # the first speaks for both
    link = first.within_machine
    assert link is not None
    assert first.across_machines is None
    assert 1e-6 <= link.latency_s < 0.1
    assert 1e6 < link.bytes_per_s < 1e12
    assert 0 < link.send_s < 0.1
    assert len(link.jitter_s) == 11
    assert link.jitter_s[0] == 0
    assert list(link.jitter_s) == sorted(link.jitter_s)
    points = first.all_reduce
    assert [(p.num_workers, p.num_bytes, p.across_machines) for p in points] == [
        (2, 4 << 10, False),
        (2, 256 << 10, False),
        (2, 4 << 20, False),  # the first that is as large as what the job reduces
    ]
    assert all(point.seconds > 0 for point in points)


@pytest.mark.parametrize(
    ("machines", "within", "across", "groups"),
    [
        ([0, 0, 2], {0}, {0}, [{(2, False), (2, True), (3, True)}, set(), set()]),
        ([0, 1, 1], {1}, {0}, [{(2, True), (3, True)}, {(2, False)}, set()]),
        ([0, 1], set(), {0}, [{(2, True)}, set()]),
    ],
)
def test_each_class_of_link_has_one_pair_and_each_group_one_voice(
    machines: list[int], within: set[int], across: set[int], groups: list[set[tuple[int, bool]]]
) -> None:
    found = measured(machines)
    assert {rank for rank, each in enumerate(found) if each.within_machine is not None} == within
    assert {rank for rank, each in enumerate(found) if each.across_machines is not None} == across
    told = [{(point.num_workers, point.across_machines) for point in each.all_reduce} for each in found]
    assert told == groups


def test_one_worker_alone_has_no_links() -> None:
    assert measured([0]) == [LinkMeasures()]
