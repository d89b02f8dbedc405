"""Places and transfers: the fewest bytes, from holders only, without a circle of waiting workers."""

from __future__ import annotations

import itertools

from hypothesis import given, settings
from hypothesis import strategies as st

from tests.morph.world_parts import NUM_SECTIONS, SECTIONS, plan_of
from varuna.generations import SectionTransfer
from varuna.morph.transfer import place, transfers_of
from varuna.spec import Plan

HELD = st.frozensets(st.integers(0, NUM_SECTIONS - 1))


def wanted(plan: Plan, rank: int) -> frozenset[int]:
    stage = plan.stage_of(rank)
    return frozenset() if stage is None else frozenset(range(stage.first_section, stage.end_section))


def moved_bytes(plan: Plan, held: dict[int, frozenset[int]]) -> int:
    return sum(
        SECTIONS[section].parameter_bytes
        for rank in range(plan.num_workers)
        for section in wanted(plan, rank) - held.get(rank, frozenset())
    )


def fewest_bytes(plan: Plan, ranks: list[int], held: dict[int, frozenset[int]]) -> int:
    """By trying every assignment."""
    places = [wanted(plan, worker) for worker in range(plan.num_workers)]
    return min(
        sum(
            SECTIONS[section].parameter_bytes
            for rank, sections in zip(order, places, strict=True)
            for section in sections - held.get(rank, frozenset())
        )
        for order in itertools.permutations(ranks)
    )


def cases() -> st.SearchStrategy[tuple[Plan, list[int], dict[int, frozenset[int]], int]]:
    def of(draw: st.DrawFn) -> tuple[Plan, list[int], dict[int, frozenset[int]], int]:
        size = draw(st.integers(1, 6))
        num_spares = draw(st.integers(0, min(2, size - 1)))
        ranks = sorted(draw(st.permutations(range(size)))[num_spares:])
        plan = plan_of(len(ranks), draw(st.integers(1, min(len(ranks), NUM_SECTIONS))))
        held = {rank: draw(HELD) for rank in range(size)}
        held[draw(st.integers(0, size - 1))] = frozenset(range(NUM_SECTIONS))
        return plan, ranks, held, size

    return st.composite(of)()


@settings(max_examples=150, deadline=None)
@given(case=cases())
def test_as_few_bytes_as_possible(case: tuple[Plan, list[int], dict[int, frozenset[int]], int]) -> None:
    plan, ranks, held, size = case
    placed = place(plan, ranks, size, held, SECTIONS)
    assert placed.num_workers == size
    assert all(not wanted(placed, rank) for rank in range(size) if rank not in ranks), "a spare got a place"
    assert moved_bytes(placed, held) == fewest_bytes(plan, ranks, held)
    sizes = [[len(wanted(plan, worker)) for worker in range(plan.num_workers)]]
    assert sorted(sizes[0]) == sorted(len(wanted(placed, rank)) for rank in ranks), "places got lost"


@settings(max_examples=150, deadline=None)
@given(case=cases(), machines=st.lists(st.sampled_from("ab"), min_size=6, max_size=6))
def test_transfers_bring_exactly_what_is_missing(
    case: tuple[Plan, list[int], dict[int, frozenset[int]], int], machines: list[str]
) -> None:
    plan, ranks, held, size = case
    placed = place(plan, ranks, size, held, SECTIONS)
    transfers = transfers_of(placed, held, machines[:size], SECTIONS)
    arrived: dict[int, set[int]] = {rank: set() for rank in range(size)}
    for transfer in transfers:
        assert transfer.section_index in held[transfer.source], "sent by somebody who has not got it"
        assert transfer.section_index not in held[transfer.destination], "it was there already"
        assert transfer.section_index not in arrived[transfer.destination], "twice"
        arrived[transfer.destination].add(transfer.section_index)
        near = any(
            machines[rank] == machines[transfer.destination]
            for rank in range(size)
            if transfer.section_index in held[rank]
        )
        assert not near or machines[transfer.source] == machines[transfer.destination], "from far, though near"
    for rank in range(size):
        assert wanted(placed, rank) <= held[rank] | arrived[rank]
        assert arrived[rank] <= wanted(placed, rank), "nobody needs it there"
    assert sum(SECTIONS[one.section_index].parameter_bytes for one in transfers) == moved_bytes(placed, held)
    check_no_circle(transfers, size)


def check_no_circle(transfers: tuple[SectionTransfer, ...], size: int) -> None:
    """Each worker does its own transfers in order; both must be at the same one. All must come to an end."""
    own = [[one for one in transfers if rank in (one.source, one.destination)] for rank in range(size)]
    while any(own):
        ready = [one for one in transfers if own[one.source][:1] == [one] == own[one.destination][:1]]
        assert ready, "everybody waits for somebody else"
        for one in ready:
            own[one.source].pop(0)
            own[one.destination].pop(0)


def test_sources_share_the_work() -> None:
    """Two have everything, two newcomers need everything: each source sends half."""
    everything = frozenset(range(NUM_SECTIONS))
    held = {0: everything, 1: everything, 2: frozenset[int](), 3: frozenset[int]()}
    transfers = transfers_of(plan_of(4, 1), held, ["a"] * 4, SECTIONS)
    sent = [
        sum(SECTIONS[one.section_index].parameter_bytes for one in transfers if one.source == rank)
        for rank in (0, 1)
    ]
    assert sent[0] == sent[1] == sum(section.parameter_bytes for section in SECTIONS)


def test_neighbours_in_the_list_run_at_the_same_time() -> None:
    everything = frozenset(range(NUM_SECTIONS))
    held = {0: everything, 1: everything, 2: frozenset[int](), 3: frozenset[int]()}
    transfers = transfers_of(plan_of(4, 1), held, ["a"] * 4, SECTIONS)
    for one, other in itertools.batched(transfers, 2) if hasattr(itertools, "batched") else _pairs(transfers):
        assert not {one.source, one.destination} & {other.source, other.destination}


def _pairs(transfers: tuple[SectionTransfer, ...]) -> list[tuple[SectionTransfer, SectionTransfer]]:
    return list(zip(transfers[::2], transfers[1::2], strict=True))


def test_who_holds_its_sections_keeps_its_place() -> None:
    plan = plan_of(4, 2)
    held = {rank: wanted(plan, rank) for rank in range(4)}
    assert place(plan, [0, 1, 2, 3], 4, held, SECTIONS) == plan
    assert transfers_of(plan, held, ["a"] * 4, SECTIONS) == ()
