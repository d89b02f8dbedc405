"""The rule of the commit: which step comes next, who rolls forward, who cannot be used."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from varuna.generations import HaltReport
from varuna.morph.recovery import recover


def report(
    num_applied: int, *, reduced: int | None = None, committed: int | None = None, text: str = ""
) -> HaltReport:
    return HaltReport(
        generation=3,
        num_applied=num_applied,
        reduced_step=reduced,
        committed_step=committed,
        committed=text or (f"outcome of {committed}" if committed is not None else ""),
        held_sections=(0,),
        reason="test",
    )


def test_nobody_saw_the_commit() -> None:
    found = recover({"a": report(4, reduced=4, committed=3), "b": report(4, committed=3)}, 0)
    assert (found.next_step, found.committed, found.rolling) == (4, "", frozenset())
    assert found.current == {"a", "b"}


def test_one_saw_the_commit() -> None:
    found = recover({"a": report(4, reduced=4, committed=3), "b": report(5, committed=4)}, 0)
    assert (found.next_step, found.committed) == (5, "outcome of 4")
    assert found.rolling == {"a"}
    assert found.current == {"a", "b"}
    assert not found.stale


def test_one_who_is_gone_had_told_of_the_commit() -> None:
    reports = {"a": report(4, reduced=4, committed=3), "b": report(4, reduced=4, committed=3)}
    found = recover(reports, 0, committed_step=4, committed="told before")
    assert (found.next_step, found.committed, found.rolling) == (5, "told before", {"a", "b"})
    found = recover(reports, 0, committed_step=3, committed="of the step before")
    assert (found.next_step, found.committed, found.rolling) == (4, "", frozenset())


def test_all_paused_after_a_step() -> None:
    found = recover({"a": report(5, committed=4), "b": report(5, committed=4)}, 0)
    assert (found.next_step, found.rolling, found.stale) == (5, frozenset(), frozenset())


def test_before_the_first_step() -> None:
    found = recover({"a": report(0), "b": report(0)}, 0)
    assert (found.next_step, found.committed) == (0, "")


def test_newcomers_that_never_trained_report_nothing_applied() -> None:
    found = recover({"old": report(7, committed=6), "new": report(0)}, 7)
    assert found.next_step == 7
    assert found.current == {"old", "new"}


def test_only_newcomers_are_left() -> None:
    found = recover({"new": report(0)}, 7)
    assert (found.next_step, found.current) == (7, {"new"})


def test_a_member_without_gradients_of_a_committed_step_is_stale() -> None:
    found = recover({"a": report(5, committed=4), "b": report(4, committed=3)}, 0)
    assert found.next_step == 5
    assert found.stale == {"b"}
    assert found.current == {"a"}


def test_a_member_two_steps_behind_is_stale() -> None:
    found = recover(
        {"a": report(6, committed=5), "b": report(5, reduced=5, committed=4), "c": report(4, reduced=4)}, 0
    )
    assert found.next_step == 6
    assert (found.rolling, found.stale) == ({"b"}, {"c"})


@given(
    step=st.integers(0, 5),
    stages=st.lists(st.sampled_from(["working", "reduced", "done"]), min_size=1, max_size=6),
)
def test_what_the_protocol_allows_never_leaves_anybody_behind(step: int, stages: list[str]) -> None:
    """If the commit returned anywhere, all had reduced: then nobody is stale, and the step is not run again."""
    if "done" in stages:
        stages = ["reduced" if stage == "working" else stage for stage in stages]
    before = step - 1 if step else None
    reports = {
        str(index): {
            "working": report(step, committed=before),
            "reduced": report(step, reduced=step, committed=before),
            "done": report(step + 1, committed=step),
        }[stage]
        for index, stage in enumerate(stages)
    }
    found = recover(reports, 0)
    assert not found.stale
    assert found.current == set(reports)
    assert found.next_step == step + ("done" in stages)
    assert found.rolling == {
        name for name, one in reports.items() if "done" in stages and one.num_applied == step
    }
    if found.rolling:
        assert found.committed == f"outcome of {step}"
