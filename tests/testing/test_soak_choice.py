"""What a soak chooses: by its seed, and never what would lose a section."""

from __future__ import annotations

from varuna.morph.views import Status, WorkerState
from varuna.plan import simple_plan
from varuna.spec import SectionSpec
from varuna.testing.soak_choice import can_lose, choose_victims, draw_faults, faults_of, members


def status(num_workers: int, *, gone: tuple[int, ...] = ()) -> Status:
    """2 stages; worker ``i`` has rank ``i``, one more is ready."""
    sections = [
        SectionSpec(
            index=index,
            name=str(index),
            parameter_names=(),
            parameter_bytes=1,
            forward_flops=1.0,
            output_bytes=1,
        )
        for index in range(4)
    ]
    plan = simple_plan(
        sections=sections, num_workers=num_workers, batch_size=8, num_stages=2, micro_batch_size=1
    ).plan
    workers = [
        WorkerState(
            incarnation=f"host.{number}.ab",
            machine="host",
            status="gone" if number in gone else "member" if number < num_workers else "ready",
            rank=number if number < num_workers else None,
            position="",
            leaving="",
            gone_reason="",
            is_connected=True,
        )
        for number in range(num_workers + 1)
    ]
    return Status(
        phase="running",
        reason="",
        generation=0,
        plan=plan,
        num_committed=0,
        workers=tuple(workers),
        events=(),
    )


def test_the_same_seed_draws_the_same_and_another_does_not() -> None:
    assert draw_faults(3, 50) == draw_faults(3, 50) != draw_faults(4, 50)
    assert draw_faults(3, 50)[:20] == draw_faults(3, 20)
    assert len({draw.kind for draw in draw_faults(3, 300)}) == 11


def test_a_section_keeps_a_holder() -> None:
    both = status(4)  # ranks 0 and 1 are a pipeline, 2 and 3 the other
    assert can_lose(both, [0])
    assert not can_lose(both, [0, 2])
    assert not can_lose(both, [0, 3])  # after the first, the three that are left have one pipeline
    assert can_lose(status(5), [0, 3])
    assert not can_lose(status(5), [0, 3, 4])
    assert can_lose(status(6), [0, 3, 4])
    assert not can_lose(status(3), [0])
    assert can_lose(status(3), [2])  # a spare
    assert can_lose(both, [4])


def test_victims_can_be_lost_together_and_the_witness_is_spared() -> None:
    assert members(status(4, gone=(2,))) == [0, 1, 3]
    for draw in draw_faults(1, 200):
        for number in range(1, 4):
            victims = choose_victims(status(5), draw, 1, number)
            assert 1 <= len(victims) <= min(number, 2)
            assert 1 not in victims
            assert can_lose(status(5), victims)
        assert len(choose_victims(status(4), draw, 1, 2)) == 1
        assert choose_victims(status(3), draw, 1, 2) == (2,)


def test_every_kind_has_its_faults() -> None:
    found = {}
    for draw in draw_faults(1, 300):
        faults = faults_of(draw, (2, 3) if draw.kind in ("kill two", "kill while it forms") else (2,), 9)
        found.setdefault(draw.kind, [(fault.what, fault.worker) for fault in faults])
    assert found == {
        "kill": [("kill", 2)],
        "kill at any time": [],
        "kill two": [("kill", 2), ("kill", 3)],
        "kill while it forms": [("kill", 2), ("kill", 3)],
        "kill a newcomer": [("kill", 9)],
        "notice": [],
        "delay": [("delay", 2)],
        "short freeze": [("freeze", 2)],
        "kill the manager": [],
        "freeze": [("freeze", 2)],
        "cut": [("cut", 2)],
    }
