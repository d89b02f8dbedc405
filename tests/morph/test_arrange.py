"""Who is in the next generation, beyond what the histories of whole jobs show."""

from __future__ import annotations

from tests.morph.world_parts import DESCRIBED, NUM_SECTIONS, planner
from varuna.morph.arrange import Arrangement, Candidate, LostState, NoPlan, arrange
from varuna.morph.recovery import LostSections

EVERYTHING = frozenset(range(NUM_SECTIONS))
PLAN_FOR = planner(1, (1,))


def worker(name: str, held: frozenset[int] = EVERYTHING, **changes: object) -> Candidate:
    return Candidate(incarnation=name, held=held, has_state=True, **changes)  # type: ignore[arg-type]


def test_the_one_that_can_stay_longest_gives() -> None:
    """Both leavers are the last holders; one is enough, and an unknown deadline is taken to be far."""
    candidates = [
        worker("soon", leaving=True, deadline_s=5.0),
        worker("late", leaving=True, deadline_s=50.0),
        worker("new", frozenset()),
    ]
    found = arrange(1, 0, candidates, DESCRIBED, PLAN_FOR)
    assert isinstance(found, Arrangement)
    assert (found.members, found.givers) == (("late", "new"), ("late",))
    found = arrange(1, 0, [*candidates, worker("some day", leaving=True)], DESCRIBED, PLAN_FOR)
    assert isinstance(found, Arrangement)
    assert found.givers == ("some day",)


def test_the_state_comes_from_the_lowest_rank_that_has_it() -> None:
    candidates = [Candidate(incarnation="a", held=EVERYTHING), worker("b"), worker("c")]
    found = arrange(1, 4, candidates, DESCRIBED, PLAN_FOR)
    assert isinstance(found, Arrangement)
    assert {one.state_rank for one in found.formations} == {1}
    assert [one.rank for one in found.formations] == [0, 1, 2]
    assert arrange(1, 4, candidates[:1], DESCRIBED, PLAN_FOR) == LostState()


def test_from_a_checkpoint_nobody_gives_anything() -> None:
    """What a leaver still holds is void: it is not kept for it."""
    candidates = [worker("old", leaving=True, deadline_s=9.0), worker("new", frozenset())]
    found = arrange(1, 4, candidates, DESCRIBED, PLAN_FOR, from_checkpoint=True)
    assert isinstance(found, Arrangement)
    assert (found.members, found.givers) == (("new",), ())
    assert found.formations[0].transfers == ()


def test_nobody() -> None:
    assert arrange(1, 0, [], DESCRIBED, PLAN_FOR) == LostSections(sections=tuple(range(NUM_SECTIONS)))
    assert isinstance(arrange(1, 0, [], DESCRIBED, PLAN_FOR, from_checkpoint=True), NoPlan)


def test_one_that_rests_is_in_without_a_place() -> None:
    found = arrange(1, 0, [worker("a"), worker("b", rests=True), worker("c")], DESCRIBED, PLAN_FOR)
    assert isinstance(found, Arrangement)
    assert found.members == ("a", "b", "c")
    assert [found.formations[0].plan.stage_of(rank) is None for rank in range(3)] == [False, True, False]


def test_a_leaver_that_cannot_be_spared_gets_a_place() -> None:
    found = arrange(1, 0, [worker("a"), worker("b", leaving=True)], DESCRIBED, planner(2, (1,)))
    assert isinstance(found, Arrangement)
    assert (found.members, found.givers) == (("a", "b"), ())
    assert found.notes == ("b cannot be spared: 1 workers are too few: it takes 2.",)
