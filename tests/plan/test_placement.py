from __future__ import annotations

import random

import numpy as np
import pytest

from varuna.errors import PlanError
from varuna.plan.cluster import Cluster, Machine
from varuna.plan.placement import Devices, Placement, place


def devices_of(text: str) -> Devices:
    return Devices(Cluster.parse(text), 10**9)


def workers_of(placement: Placement) -> list[list[int]]:
    return [row for kind in placement.kinds for row in kind.workers.tolist()]


def num_crossings(placement: Placement, devices: Devices) -> int:
    rows = [devices.machine[row] for row in workers_of(placement)]
    return sum(int((machines[1:] != machines[:-1]).sum()) for machines in rows)


def test_pipelines_stay_on_machines():
    devices = devices_of("3x4")
    placement = place(devices, [4], [3])
    assert workers_of(placement) == [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]
    assert placement.reduces_across
    assert placement.groups_per_machine == 4
    assert placement.streams_per_machine == 0
    assert not placement.kinds[0].crosses.any()


def test_replicas_stay_on_machines():
    devices = devices_of("3x4")
    placement = place(devices, [3], [4], "replicas")
    assert workers_of(placement) == [[0, 4, 8], [1, 5, 9], [2, 6, 10], [3, 7, 11]]
    assert not placement.reduces_across
    assert placement.groups_per_machine == 1
    assert placement.streams_per_machine == 8  # the middle machine: 4 on, 4 back
    assert placement.kinds[0].crosses.tolist() == [True, True, False]


def test_whole_pipelines_first_then_what_is_left_over():
    devices = devices_of("3x4,2x1")
    placement = place(devices, [3], [4])
    rows = workers_of(placement)
    assert rows[:3] == [[0, 1, 2], [4, 5, 6], [8, 9, 10]]
    assert rows[3] == [3, 7, 11]
    assert num_crossings(placement, devices) == 2


def test_large_machines_come_first_whatever_the_order():
    devices = devices_of("2x1,3x4")
    placement = place(devices, [4], [3])
    assert num_crossings(placement, devices) == 0
    assert {worker for row in workers_of(placement) for worker in row} == set(range(2, 14))


def test_fast_machines_come_first_and_kinds_are_apart():
    machines = (
        Machine(name="slow", num_workers=2, speed=0.5),
        Machine(name="fast", num_workers=4),
        Machine(name="small", num_workers=2, memory_bytes=10),
    )
    placement = place(Devices(Cluster(machines=machines), 10**9), [2], [4])
    assert [kind.workers.tolist() for kind in placement.kinds] == [[[2, 3], [4, 5]], [[6, 7]], [[0, 1]]]
    assert [kind.speed.tolist() for kind in placement.kinds] == [[1, 1], [1, 1], [0.5, 0.5]]
    assert placement.kinds[1].memory_bytes.tolist() == [10, 10]


def test_unlike_depths():
    devices = devices_of("11")
    placement = place(devices, [3, 4], [1, 2])
    assert [kind.workers.shape for kind in placement.kinds] == [(1, 3), (2, 4)]
    assert placement.num_pipelines == 3


@pytest.mark.parametrize("layout", ["pipelines", "replicas"])
def test_every_worker_is_used_at_most_once(layout):
    rng = random.Random(layout)
    for _ in range(60):
        machines = tuple(
            Machine(name=str(index), num_workers=rng.randint(1, 6), speed=rng.choice([1.0, 0.5]))
            for index in range(rng.randint(1, 5))
        )
        devices = Devices(Cluster(machines=machines), 10**9)
        depth = rng.randint(1, devices.num_workers)
        count = rng.randint(1, devices.num_workers // depth)
        placement = place(devices, [depth], [count], layout)
        used = [worker for row in workers_of(placement) for worker in row]
        assert len(used) == len(set(used)) == depth * count
        assert set(used) <= set(range(devices.num_workers))
        for kind in placement.kinds:
            machines_of = devices.machine[kind.workers]
            assert (kind.crossing[:, :-1] == (machines_of[:, 1:] != machines_of[:, :-1])).all()
            assert kind.crossing.sum(axis=1).max() == kind.crosses.sum()
            assert (devices.speed[kind.workers] == kind.speed).all()
            assert (devices.memory_bytes[kind.workers] == kind.memory_bytes).all()


def test_pipelines_cross_no_more_than_in_the_order_of_workers():
    rng = random.Random(0)
    for _ in range(60):
        devices = devices_of(",".join(f"{rng.randint(1, 3)}x{rng.randint(1, 5)}" for _ in range(3)))
        depth = rng.randint(1, min(5, devices.num_workers))
        count = devices.num_workers // depth
        plain = np.arange(depth * count).reshape(count, depth)
        crossing = devices.machine[plain][:, 1:] != devices.machine[plain][:, :-1]
        whole = (devices.machine[plain] == devices.machine[plain][:, :1]).all(axis=1).sum()
        placement = place(devices, [depth], [count])
        rows = [devices.machine[row] for row in workers_of(placement)]
        assert sum(len(set(row.tolist())) == 1 for row in rows) >= whole
        if depth <= 2:
            assert num_crossings(placement, devices) <= crossing.sum()


def test_a_speed_of_nothing_is_refused():
    with pytest.raises(PlanError, match="Machine x has speed 0"):
        Devices(Cluster(machines=(Machine(name="x", num_workers=1, speed=0.0),)), 1)
