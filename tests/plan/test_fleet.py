"""Replayed fleets: small traces worked out by hand, and what holds for every trace."""

from __future__ import annotations

import math
from dataclasses import replace
from itertools import pairwise

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from tests.plan.fleets import TablePlanner, fleet_plan
from varuna.errors import ConfigError, PlanError
from varuna.plan.fleet import FleetOptions, replay_fleet
from varuna.plan.fleet_cost import on_demand_bill, spot_bill
from varuna.plan.fleet_plans import FleetPlan
from varuna.plan.fleet_result import Activity, FleetResult, TimeSpent
from varuna.plan.fleet_trace import FleetTrace, parse_trace

QUIET = FleetOptions(morph_s=0, notice_s=0, sudden_share=0, checkpoint_interval_s=1e6, restore_s=0)
TWO_STAGES = TablePlanner({2: 10.0, 3: 10.0, 4: 5.0}, num_stages=2)


def seconds(**events: str) -> str:
    """``seconds(_0="add a b", _35="remove a")`` as a trace's text."""
    lines = []
    for time, text in events.items():
        verb, *names = text.split()
        lines += [f"{int(float(time[1:].replace('_', '.')) * 1000)},{verb},{name}" for name in names]
    return "\n".join(lines)


def replay(
    text: str, planner: TablePlanner = TWO_STAGES, options: FleetOptions = QUIET, **changes: float
) -> FleetResult:
    values = {name: getattr(options, name) for name in options.__dataclass_fields__} | changes
    return replay_fleet(parse_trace(text, "trace"), planner, FleetOptions(**values))


def spent(**named: float) -> TimeSpent:
    return TimeSpent(**{f"{activity.value}_s": named.get(activity.value, 0.0) for activity in Activity})


def about(wanted: TimeSpent) -> object:
    return pytest.approx(vars(wanted))


def test_a_fleet_that_never_changes() -> None:
    # 20 s of start, 8 steps of 10 s, 3 s of the ninth.
    result = replay(seconds(_0="add a b", _103="remove a"), morph_s=20)
    assert (result.num_steps, result.samples, result.num_morphs) == (8, 800, 1)
    assert vars(result.wall) == about(spent(morph=20, training=80, unfinished=3))
    assert vars(result.machines) == about(spent(morph=40, training=160, unfinished=6))
    assert result.ideal_samples == pytest.approx(1030)
    assert result.goodput == pytest.approx(800 / 1030)
    assert result.samples_per_s == pytest.approx(800 / 103)


def test_a_preemption_without_notice_loses_the_step_under_way_but_not_the_state() -> None:
    # Two pipelines, 5 s a step, 6 s of start: steps end at 11 and 16. At 12 d goes, 1 s is lost. a, b, c go on
    # with one pipeline, 10 s a step, c spare: from 18 (6 s of morph) to 58, 2 s unfinished.
    result = replay(
        seconds(_0="add a b c d", _12="remove d", _60="remove a"), morph_s=6, checkpoint_interval_s=1
    )
    assert vars(result.wall) == about(spent(morph=12, training=5 + 40, redone=1, unfinished=2))
    assert vars(result.machines) == about(
        spent(morph=6 * 4 + 6 * 3, training=5 * 4 + 40 * 2, redone=4, unfinished=4, spare=42)
    )
    assert (result.num_steps, result.samples) == (5, 500)
    assert result.num_restores == 0


def test_a_preemption_with_notice_loses_nothing_if_a_step_ends_in_time() -> None:
    # Notice at 12 (3 s before 15): the step that began at 10 ends at 15, when d goes; then 10 s a step.
    text = seconds(_0="add a b c d", _15="remove d", _60="remove a")
    result = replay(text, notice_s=3)
    assert vars(result.wall) == about(spent(training=15 + 40, unfinished=5))
    # Notice of 1 s: none ends between 16.5 and 17.5, so 2.5 s are lost.
    late = replay(text.replace("15000", "17500"), notice_s=1)
    assert vars(late.wall) == about(spent(training=15 + 40, redone=2.5, unfinished=2.5))
    # The same, sudden.
    sudden = replay(text.replace("15000", "17500"), notice_s=3, sudden_share=1)
    assert sudden == replay(text.replace("15000", "17500"), notice_s=0)
    assert sudden.wall.redone_s == pytest.approx(2.5)


def test_a_machine_with_notice_is_a_spare_until_it_goes() -> None:
    # Notice at 10: the step that began at 10 ends at 15, and d is paid for until 20.
    result = replay(seconds(_0="add a b c d", _20="remove d", _35="remove a"), notice_s=10)
    assert vars(result.machines) == about(spent(training=15 * 4 + 20 * 2, spare=5 * 2 + 15))


def test_when_all_holders_of_a_section_go_the_job_goes_back_to_the_checkpoint() -> None:
    # One pipeline, a spare from 47 on. Steps end at 10, 20, 30, 40; a checkpoint at 30. b goes at 47.001:
    # 30-40 and 7.001 s of the next step are lost. 8 s to restore, two steps from 55.001 on, 9.999 s unfinished.
    text = seconds(_0="add a b", _47="add c", _47_001="remove b", _85="remove a")
    planner = TablePlanner({2: 10.0, 3: 10.0}, num_stages=2)
    result = replay(text, planner, checkpoint_interval_s=25, restore_s=8)
    assert result.num_restores == 1
    assert vars(result.wall) == about(spent(training=30 + 20, redone=17.001, restore=8, unfinished=9.999))
    assert result.samples == 500
    did = [(item.activity.value, item.start_s) for item in result.intervals]
    assert did[:3] == [("training", 0), ("redone", 30), ("restore", 47.001)]
    with_notice = replay(text, planner, checkpoint_interval_s=25, restore_s=8, notice_s=1)
    assert with_notice.num_restores == 0
    assert with_notice.wall.redone_s == pytest.approx(7.001)


def test_waiting_for_enough_machines() -> None:
    # b goes at 25: a alone cannot go on, and half the model is gone with b; nothing was saved.
    text = seconds(_0="add a b", _25="remove b", _40="add c", _80="remove a")
    result = replay(text, morph_s=5, restore_s=3)
    assert vars(result.wall) == about(
        spent(morph=10, restore=3, waiting=15, training=30, redone=20, unfinished=2)
    )
    assert result.machines.waiting_s == pytest.approx(15)
    assert result.samples == 300
    # With notice b hands its half to a: two steps more, and no restore.
    kept = replay(text, morph_s=5, restore_s=3, notice_s=0.1)
    assert vars(kept.wall) == about(spent(morph=10, waiting=15, training=20 + 30, unfinished=5))


def test_all_machines_go_with_notice_to_a_checkpoint() -> None:
    text = seconds(_0="add a b", _25="remove a b", _40="add c d", _80="remove c")
    result = replay(text, restore_s=3, notice_s=1)
    assert vars(result.wall) == about(spent(training=20 + 30, redone=5, waiting=15, restore=3, unfinished=7))
    gone = replay(text, restore_s=3)
    assert vars(gone.wall) == about(spent(training=30, redone=25, waiting=15, restore=3, unfinished=7))


def test_a_spare_comes_and_goes_unnoticed() -> None:
    result = replay(seconds(_0="add a b", _13="add c", _38="remove c", _60="remove a"), morph_s=7)
    assert result.num_morphs == 1
    assert vars(result.wall) == about(spent(morph=7, training=50, unfinished=3))
    assert result.machines.spare_s == pytest.approx(25)


def test_newcomers_wait_for_the_end_of_a_step() -> None:
    # c at 12, d at 14: at 20 there are four, 2 s of morph, steps of 5 s from 22 on.
    result = replay(seconds(_0="add a b", _12="add c", _14="add d", _40="remove a"), morph_s=2)
    # First start: 0-2; steps 2-12, 12-22; morph 22-24; steps 24-29-34-39.
    assert vars(result.wall) == about(spent(morph=4, training=35, unfinished=1))
    assert vars(result.machines) == about(
        spent(morph=4 + 8, training=20 * 2 + 15 * 4, unfinished=4, spare=10 + 8)
    )
    assert [interval.num_pipelines for interval in result.intervals] == [1, 1, 2, 2, 2]


def test_newcomers_start_while_the_others_train() -> None:
    # c at 12 and d at 14 are ready at 25 and 27: at 32 there are four, 2 s of morph, steps of 5 s from 34 on.
    text = seconds(_0="add a b", _12="add c", _14="add d", _50="remove a")
    result = replay(text, morph_s=2, start_s=13)
    assert vars(result.wall) == about(spent(morph=4, training=30 + 15, unfinished=1))
    assert result.machines.spare_s == pytest.approx(20 + 18)


def test_one_that_goes_before_it_is_ready_disturbs_nothing() -> None:
    text = seconds(_0="add a b c", _12="add d", _20="remove d", _30="add d", _50="remove a")
    result = replay(text, morph_s=2, start_s=15)
    # The second d is ready at 45: from 52 on four would train.
    assert vars(result.wall) == about(spent(morph=2, training=40, unfinished=8))


def test_a_change_during_a_morph_starts_it_again_only_if_it_takes_a_machine_in_use() -> None:
    planner = TablePlanner({2: 10.0, 3: 10.0, 4: 5.0}, num_stages=2)
    joined = replay(seconds(_0="add a b", _4="add c", _40="remove a"), planner, morph_s=10)
    assert vars(joined.wall) == about(spent(morph=10, training=30))
    lost = replay(seconds(_0="add a b c", _4="remove a", _40="remove b"), planner, morph_s=10)
    assert vars(lost.wall) == about(spent(morph=14, training=20, unfinished=6))


def test_a_spare_that_will_go_does_not_start_a_morph_again() -> None:
    text = seconds(_0="add a b c", _8="remove c", _40="remove a")
    assert vars(replay(text, morph_s=10, notice_s=3).wall) == about(spent(morph=10, training=30))


def test_a_machine_that_the_new_plan_does_not_use_may_be_the_last_holder() -> None:
    # a b and c d are pipelines. b goes at 12: a and c are to go on, with what only d has. It goes at 14.
    text = seconds(_0="add a b c d", _12="remove b", _14="remove d", _60="remove a")
    result = replay(text, morph_s=6, restore_s=5)
    # Start 0-6, a step to 11, 1 s lost at 12, morphs 12-14 and 14-20, restore 20-25, three steps from 25 on.
    assert vars(result.wall) == about(spent(morph=14, redone=6, restore=5, training=30, unfinished=5))
    assert (result.samples, result.num_restores) == (300, 1)


def test_machines_of_several_devices() -> None:
    plan = fleet_plan(3, 4, 10.0, devices_per_machine=2)
    assert plan.num_machines == 3
    assert plan.used_machines == {0, 1}
    assert plan.holders == (frozenset({0}), frozenset({0}), frozenset({1}), frozenset({1}))


def test_costs() -> None:
    result = replay(seconds(_0="add a b", _3600="add c", _7200="remove a"))
    spot = spot_bill(result, 0.9)
    assert spot.cost == pytest.approx(0.9 * 5)
    assert spot.num_machines == 2.5
    assert spot.cost_per_million == pytest.approx(4.5 / 72_000 * 1e6)
    steady = on_demand_bill(result, TWO_STAGES, 3.0)  # two machines for the 7200 s that 720 steps take
    assert (steady.num_machines, steady.hours, steady.cost) == (2, pytest.approx(2), pytest.approx(12))
    with pytest.raises(ConfigError, match="price of -1"):
        spot_bill(result, -1)


def test_on_demand_takes_the_mean_number() -> None:
    planner = TablePlanner({1: 30.0, 2: 10.0, 3: 9.0})
    result = replay(seconds(_0="add a", _1000="add b c", _2000="remove a"), planner)
    assert on_demand_bill(result, planner, 1.0).num_machines == 2


def test_on_demand_takes_more_than_the_mean_where_the_model_needs_them() -> None:
    result = replay(seconds(_0="add a b c d", _100="remove a b c", _1000="remove d"))
    assert result.mean_machines < 1.5
    assert on_demand_bill(result, TWO_STAGES, 3.0).num_machines == 2


def test_a_fleet_that_is_always_too_small() -> None:
    with pytest.raises(PlanError, match="trace never has enough machines for this model: at most 1"):
        replay(seconds(_0="add a", _60="remove a"))


@pytest.mark.parametrize(
    ("name", "value"),
    [("morph_s", -1.0), ("notice_s", math.inf), ("restore_s", math.nan), ("sudden_share", 1.5)],
)
def test_options_are_checked(name: str, value: float) -> None:
    with pytest.raises(ConfigError, match=f"{name}="):
        FleetOptions(**{name: value})


def test_the_draw_of_sudden_preemptions_depends_on_the_seed_alone() -> None:
    text = "\n".join(f"{index * 7000},add,n{index}" for index in range(40)) + "\n"
    text += "\n".join(f"{300_000 + index * 7000},remove,n{index}" for index in range(38))
    planner = TablePlanner({count: 20 / count for count in range(1, 41)})
    runs = [replay(text, planner, notice_s=30, sudden_share=0.5, seed=seed) for seed in (1, 1, 2)]
    assert runs[0] == runs[1] != runs[2]
    shares = [replay(text, planner, notice_s=30, sudden_share=share).wall.redone_s for share in (0, 0.5, 1)]
    assert shares == sorted(shares)
    assert shares[0] < shares[1] < shares[2]


# --- for every trace -------------------------------------------------------------------------


class Linear:
    """Steps take 120 s over the number of whole pipelines of three stages."""

    def __init__(self) -> None:
        self.plans: dict[int, FleetPlan] = {}

    def __call__(self, num_machines: int) -> FleetPlan | None:
        if num_machines >= 3 and num_machines not in self.plans:
            self.plans[num_machines] = fleet_plan(num_machines, 3, 120 / (num_machines // 3))
        return self.plans.get(num_machines)


PLANNER = Linear()


@st.composite
def traces(draw: st.DrawFn) -> FleetTrace:
    present = ["a", "b", "c"]
    lines, time_ms = ["0,add,a", "0,add,b", "0,add,c"], 0
    for index in range(draw(st.integers(2, 40))):
        time_ms += draw(st.sampled_from([0, 1, 500, 30_000, 120_000, 600_000, 3_600_000]))
        if present and draw(st.booleans()):
            lines.append(f"{time_ms},remove,{present.pop(draw(st.integers(0, len(present) - 1)))}")
        else:
            present.append(f"n{index}")
            lines.append(f"{time_ms},add,n{index}")
    lines.append(f"{time_ms + 1000},add,last")  # the trace ends with it: it does nothing
    return parse_trace("\n".join(lines), "drawn")


OPTIONS = st.builds(
    FleetOptions,
    morph_s=st.sampled_from([0.0, 1.0, 45.0, 1000.0]),
    start_s=st.sampled_from([0.0, 10.0, 500.0]),
    notice_s=st.sampled_from([0.0, 30.0, 120.0, 5000.0]),
    sudden_share=st.sampled_from([0.0, 0.3, 1.0]),
    checkpoint_interval_s=st.sampled_from([0.0, 100.0, 1e5]),
    restore_s=st.sampled_from([0.0, 90.0]),
)


@settings(deadline=None, max_examples=200)
@given(traces(), OPTIONS)
def test_time_is_conserved(trace: FleetTrace, options: FleetOptions) -> None:
    assume(enough(trace))
    result = replay_fleet(trace, PLANNER, options)
    ends = [*(count.time_s for count in result.counts[1:]), trace.end_s]
    paid = sum(
        count.num_machines * (end - count.time_s) for count, end in zip(result.counts, ends, strict=True)
    )
    assert result.wall.total_s == pytest.approx(trace.end_s, abs=1e-6)
    assert result.machines.total_s == pytest.approx(paid, abs=1e-5)
    assert min(*vars(result.wall).values(), *vars(result.machines).values()) >= -1e-6
    assert result.wall.spare_s == 0
    assert result.samples == 100 * result.num_steps >= 0
    assert result.goodput <= 1 + 1e-9
    assert result.num_restores <= result.num_morphs


@settings(deadline=None, max_examples=100)
@given(traces(), OPTIONS)
def test_what_the_job_did_has_no_gaps(trace: FleetTrace, options: FleetOptions) -> None:
    assume(enough(trace))
    result = replay_fleet(trace, PLANNER, options)
    assert result.intervals[0].start_s == 0
    for before, after in pairwise(result.intervals):
        assert after.start_s == pytest.approx(before.end_s, abs=1e-6)
        assert not before.continues_in(after) or before.activity is Activity.REDONE
    assert result.intervals[-1].end_s == pytest.approx(trace.end_s, abs=1e-6)
    for activity in (Activity.TRAINING, Activity.REDONE, Activity.MORPH, Activity.WAITING):
        did = [item.end_s - item.start_s for item in result.intervals if item.activity is activity]
        assert sum(did) == pytest.approx(getattr(result.wall, f"{activity.value}_s"), abs=1e-6)
    for interval in result.intervals:
        assert interval.num_machines == 3 * interval.num_pipelines
        assert (interval.samples_per_s > 0) == (interval.activity is Activity.TRAINING)


@settings(deadline=None, max_examples=100)
@given(traces(), st.sampled_from([1.0, 30.0, 1e7]))
def test_with_notice_no_finished_step_is_lost(trace: FleetTrace, notice_s: float) -> None:
    assume(enough(trace))
    result = replay_fleet(trace, PLANNER, replace(QUIET, notice_s=notice_s, morph_s=20))
    longest_step_s = 120
    removals = sum(bool(change.removed) for change in trace.changes)
    assert result.wall.redone_s <= removals * longest_step_s


def enough(trace: FleetTrace) -> bool:
    """Some moment has three machines."""
    present = 0
    for change, later in pairwise(trace.changes):
        present += len(change.added) - len(change.removed)
        if present >= 3 and later.time_s > change.time_s:
            return True
    return False
