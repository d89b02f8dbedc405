"""What is chosen: fits, uses each worker once, keeps what was fixed, and nothing simple or exhaustive beats
it."""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product
from math import inf
from typing import Any

import pytest

from tests.plan.profiles import make_costs, make_profile, make_section
from tests.plan.random_profiles import SIZES, random_profile
from tests.plan.support import make_sections
from varuna.errors import PlanError
from varuna.plan import SCHEDULES, simple_plan
from varuna.plan.choose import SURE, Choice, choose_plan, plan_of
from varuna.plan.cluster import Cluster, Machine
from varuna.plan.estimate import load_profile
from varuna.plan.points import PointMaker
from varuna.plan.predict import Prediction, predict
from varuna.plan.profile import LinkProfile, Profile
from varuna.plan.search import Search
from varuna.plan.setting import Setting
from varuna.plan.shares import share_out
from varuna.plan.wish import Wish
from varuna.spec import PipelineSpec, Plan, StageSpec

CLUSTERS = ("1", "4", "1x4", "2x4", "3x4,2x1", "7x1")


def random_choices(seed: int, **arguments: Any) -> Iterator[tuple[Profile, Cluster, dict[str, Any]]]:
    rng = random.Random(f"choose {seed}")
    for _ in range(6):
        profile = random_profile(rng, rng.randint(2, 7))
        cluster = Cluster.parse(rng.choice(CLUSTERS))
        yield profile, cluster, {"batch_size": rng.choice([8, 17, 64, 120])} | arguments


def most_memory(prediction: Prediction) -> int:
    return max(stage.peak_memory_bytes for pipeline in prediction.pipelines for stage in pipeline.stages)


def check(choice: Choice, profile: Profile, cluster: Cluster, batch_size: int) -> None:
    """What holds for every choice. (A ``Plan`` refuses a worker that is used twice.)"""
    plan = choice.plan
    assert plan.num_workers == cluster.num_workers
    assert (plan.batch_size, plan.num_sections) == (batch_size, len(profile.sections))
    assert choice.prediction.step_s == predict(plan, profile, cluster, num_runs=5).step_s
    memory = [
        m.memory_bytes or profile.device_memory_bytes for m in cluster.machines for _ in range(m.num_workers)
    ]
    for pipeline in choice.prediction.pipelines:
        for stage in pipeline.stages:
            assert stage.peak_memory_bytes <= memory[stage.worker_index]
    best, *others = choice.candidates
    assert best.rejected == ""
    assert all(row.rejected for row in others)
    assert best.step_s == choice.prediction.step_s
    assert best.step_s <= min((row.step_s for row in others if row.simulated), default=inf) / SURE
    assert (best.micro_batch_size, best.schedule) == (plan.micro_batch_size, plan.schedule)
    assert best.num_pipelines == len(plan.pipelines)


# --- nothing beats it -----------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(5))
def test_never_slower_than_the_simple_plan(seed):
    for profile, cluster, arguments in random_choices(seed):
        choice = choose_plan(profile, cluster, **arguments)
        check(choice, profile, cluster, arguments["batch_size"])
        flops = [section.costs[0].forward_s for section in profile.sections]
        for num_stages, size in product((None, 1, 2, 3), (None, 1, 2, 4)):
            try:
                simple = simple_plan(
                    sections=make_sections(flops),
                    num_workers=cluster.num_workers,
                    num_stages=num_stages,
                    micro_batch_size=size,
                    **arguments,
                ).plan
            except PlanError:
                continue
            if simple.micro_batch_size <= max(SIZES):
                assert choice.prediction.step_s <= predict(simple, profile, cluster).step_s * (1 + 1e-9)


def every_plan(profile: Profile, num_workers: int, batch_size: int) -> Iterator[Plan]:
    """All borders, m, D, schedules, and recompute everywhere or nowhere; workers in their order."""
    count = len(profile.sections)
    for depth in range(1, min(4, count, num_workers) + 1):
        for inner, size in product(combinations(range(1, count), depth - 1), SIZES):
            num = -(-batch_size // size)
            for pipelines in range(1, min(num, num_workers // depth) + 1):
                for schedule, recompute in product(SCHEDULES, (False, True)):
                    yield laid_out(
                        (0, *inner, count), pipelines, num_workers, batch_size, size, schedule, recompute
                    )


def laid_out(  # noqa: PLR0917
    borders: tuple[int, ...],
    pipelines: int,
    num_workers: int,
    batch_size: int,
    size: int,
    schedule: str,
    recompute: bool,
) -> Plan:
    num, depth = -(-batch_size // size), len(borders) - 1
    ends = [num * index // pipelines for index in range(pipelines + 1)]
    return Plan(
        pipelines=tuple(
            PipelineSpec(
                stages=tuple(
                    StageSpec(
                        worker_index=index * depth + stage, first_section=a, end_section=b, recompute=recompute
                    )
                    for stage, (a, b) in enumerate(pairwise(borders))
                ),
                first_micro_batch=ends[index],
                end_micro_batch=ends[index + 1],
            )
            for index in range(pipelines)
        ),
        num_workers=num_workers,
        num_sections=borders[-1],
        batch_size=batch_size,
        micro_batch_size=size,
        schedule=schedule,
    )


@pytest.mark.parametrize("share", [0.35, 0.7, 9.0])
@pytest.mark.parametrize("seed", range(4))
def test_an_exhaustive_search_finds_nothing_one_percent_better(seed, share):
    rng = random.Random(f"exhaustive {seed}")
    profile = random_profile(rng, 5)
    cluster = Cluster.parse(rng.choice(["1x4", "4", "2x2"]))
    batch_size = rng.choice([8, 13, 24])
    alone = laid_out((0, 5), 1, 4, batch_size, 1, "1f1b", False)
    memory = int(most_memory(predict(alone, profile, cluster)) * share)
    profile = replace(profile, device_memory_bytes=memory)
    best_s = inf
    for plan in every_plan(profile, 4, batch_size):
        prediction = predict(plan, profile, cluster)
        if most_memory(prediction) <= memory:
            best_s = min(best_s, prediction.step_s)
    try:
        chosen_s = choose_plan(profile, cluster, batch_size=batch_size).prediction.step_s
    except PlanError:
        chosen_s = inf
    assert chosen_s <= best_s * 1.01


@pytest.mark.parametrize("seed", range(4))
def test_more_memory_never_makes_it_slower(seed):
    rng = random.Random(f"memory {seed}")
    profile = random_profile(rng, 6)
    cluster = Cluster.parse(rng.choice(["1x4", "2x4"]))
    free = choose_plan(profile, cluster, batch_size=32)
    last_s = inf
    for share in (0.1, 0.2, 0.3, 0.4, 0.5, 0.7, 0.9, 1.0, 2.0):
        memory = int(most_memory(free.prediction) * share)
        try:
            choice = choose_plan(replace(profile, device_memory_bytes=memory), cluster, batch_size=32)
        except PlanError:
            assert last_s == inf, "more memory, and nothing fits any more"
            continue
        assert choice.prediction.step_s <= last_s * 1.002
        last_s = choice.prediction.step_s
    assert last_s == pytest.approx(free.prediction.step_s, rel=2e-3)


# --- bounds and shortcuts -------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(6))
def test_no_bound_is_above_what_is_predicted(seed):
    for profile, cluster, arguments in random_choices(seed):
        setting = Setting(profile, cluster, Wish(**arguments))
        search = Search(setting=setting, maker=PointMaker(setting))
        search.run()
        for outcome in search.outcomes:
            predicted_s = predict(plan_of(outcome.laid, setting), profile, cluster).step_s
            assert outcome.laid.point.bound_s <= predicted_s * (1 + 1e-9), outcome.laid


@pytest.mark.parametrize("seed", range(6))
def test_the_fast_simulation_agrees_with_the_prediction(seed):
    """Exactly on one machine with like pipelines that share the batch evenly."""
    for profile, _, _ in random_choices(seed):
        cluster = Cluster.parse("1x6")
        setting = Setting(profile, cluster, Wish(batch_size=12 * 4))
        search = Search(setting=setting, maker=PointMaker(setting))
        search.run()
        for outcome in search.outcomes:
            laid = outcome.laid
            plan = plan_of(laid, setting)
            if (
                len(laid.kinds) > 1
                or plan.batch_size % (plan.micro_batch_size * len(plan.pipelines))
                or profile.ties
            ):
                continue
            prediction = predict(plan, profile, cluster)
            close = 0.02 if len(plan.pipelines) > 1 else 1e-6  # reductions are counted in less detail
            assert outcome.step_s == pytest.approx(prediction.step_s, rel=close)
            assert outcome.memory_bytes == pytest.approx(most_memory(prediction), abs=8)


def test_long_steps_are_extrapolated_from_their_steady_state():
    profile = make_profile(8, task_overhead_s=0.01)
    for schedule in ("varuna", "1f1b", "zero-bubble"):
        wish = Wish(batch_size=3000, num_stages=4, micro_batch_size=1, schedules=(schedule,))
        setting = Setting(profile, Cluster.parse("1x4"), wish)
        search = Search(setting=setting, maker=PointMaker(setting))
        search.run()
        (outcome,) = search.outcomes
        assert outcome.num_tasks < 3000
        predicted = predict(plan_of(outcome.laid, setting), profile, Cluster.parse("1x4"))
        assert outcome.step_s == pytest.approx(predicted.step_s, rel=1e-4)
        assert outcome.bubble == pytest.approx(predicted.bubble, abs=1e-3)


def test_the_answer_is_the_same_every_time():
    profile = random_profile(random.Random(3), 6)
    first, second = (choose_plan(profile, Cluster.parse("2x4"), batch_size=50) for _ in range(2))
    assert first == second


# --- what the user fixes --------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_what_is_fixed_is_kept(seed):
    rng = random.Random(f"fixed {seed}")
    for profile, cluster, arguments in random_choices(seed):
        most = min(len(profile.sections), cluster.num_workers)
        fixed = {
            "num_stages": rng.choice([None, rng.randint(1, most)]),
            "micro_batch_size": rng.choice([None, 1, 3, 5, 8]),
            "schedule": rng.choice([None, *SCHEDULES]),
            "recompute": rng.choice([None, True, False]),
        }
        choice = choose_plan(profile, cluster, **arguments, **fixed)
        check(choice, profile, cluster, arguments["batch_size"])
        depths = {len(pipeline.stages) for pipeline in choice.plan.pipelines}
        assert fixed["num_stages"] is None or depths == {fixed["num_stages"]}
        assert fixed["micro_batch_size"] in (None, choice.plan.micro_batch_size)
        assert fixed["schedule"] in (None, choice.plan.schedule)
        if fixed["recompute"] is not None:
            for pipeline in choice.plan.pipelines:
                inner = pipeline.stages if choice.plan.schedule == "gpipe" else pipeline.stages[:-1]
                assert {stage.recompute for stage in inner} <= {fixed["recompute"]}


def test_a_flag_for_each_stage_fixes_their_number():
    choice = choose_plan(make_profile(6), Cluster.parse("1x6"), batch_size=24, recompute=[True, False, False])
    assert {tuple(s.recompute for s in p.stages) for p in choice.plan.pipelines} == {(True, False, False)}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ({"num_stages": 5}, ["5 stages", "4 sections", "8 workers", "1 to 4", "cut points"]),
        ({"num_stages": 0}, ["0 stages"]),
        ({"micro_batch_size": 99}, ["32 samples", "micro-batches of 99"]),
        ({"schedule": "zigzag"}, ["'zigzag'"]),
        ({"recompute": [True], "num_stages": 2}, ["1 flags", "2 stages"]),
        ({"batch_size": 0}, ["batch size 0"]),
    ],
)
def test_what_cannot_be_laid_out_is_refused(arguments, words):
    with pytest.raises(PlanError) as error:
        choose_plan(make_profile(4), Cluster.parse("2x4"), **({"batch_size": 32} | arguments))
    for word in words:
        assert word in str(error.value)


# --- memory ---------------------------------------------------------------------------------


def test_when_nothing_fits_the_tightest_stage_is_named():
    large = make_section(2, parameter_bytes=10**6, gradient_bytes=10**6, optimizer_bytes=2 * 10**6)
    sections = make_profile(4).sections
    profile = make_profile(4, sections=(*sections[:2], large, sections[3]), device_memory_bytes=10**6)
    with pytest.raises(PlanError) as error:
        choose_plan(profile, Cluster.parse("1x8"), batch_size=8)
    for word in ["8 workers", "stage 2 (section 2)", "5 MB", "a device has 1 MB", "more cut points"]:
        assert word in str(error.value)


def test_when_nothing_fits_so_few_workers_more_of_them_would_help():
    profile = make_profile(8, device_memory_bytes=13_000)
    with pytest.raises(PlanError, match=r"2 stages .* More workers would help \(the 8 sections"):
        choose_plan(profile, Cluster.parse("2"), batch_size=8)
    assert choose_plan(profile, Cluster.parse("8"), batch_size=8).plan.pipelines


@pytest.mark.parametrize(
    ("fixed", "word"),
    [
        ({"micro_batch_size": 32}, "another micro-batch size"),
        ({"recompute": False, "schedule": "gpipe"}, "recompute where memory needs it"),
        ({"num_stages": 1}, "another number of stages"),
        ({"schedule": "gpipe", "recompute": False}, "another schedule"),
    ],
)
def test_when_what_was_fixed_does_not_fit_it_is_said_what_would(fixed, word):
    profile = make_profile(4, device_memory_bytes=5200)
    assert choose_plan(profile, Cluster.parse("1x4"), batch_size=64)
    with pytest.raises(PlanError) as error:
        choose_plan(profile, Cluster.parse("1x4"), batch_size=64, **fixed)
    assert "It would fit with " in str(error.value)
    assert word in str(error.value)


def test_recompute_only_where_memory_needs_it():
    roomy = choose_plan(make_profile(8), Cluster.parse("1x4"), batch_size=64, num_stages=4)
    assert not any(stage.recompute for pipeline in roomy.plan.pipelines for stage in pipeline.stages)
    needed = roomy.prediction.pipelines[0].stages[-1].peak_memory_bytes
    tight = replace(make_profile(8), device_memory_bytes=needed)
    choice = choose_plan(tight, Cluster.parse("1x4"), batch_size=64, num_stages=4, micro_batch_size=1)
    flags = [stage.recompute for stage in choice.plan.pipelines[0].stages]
    assert flags[0]
    assert not flags[-1]


def test_each_machine_has_its_own_memory():
    machines = (Machine(name="small", num_workers=2, memory_bytes=6000), Machine(name="large", num_workers=2))
    cluster = Cluster(machines=machines)
    choice = choose_plan(make_profile(6), cluster, batch_size=24)
    check(choice, make_profile(6), cluster, 24)


# --- machines -------------------------------------------------------------------------------


def test_slow_machines_get_fewer_micro_batches():
    machines = (Machine(name="slow", num_workers=2, speed=0.5), Machine(name="fast", num_workers=2))
    choice = choose_plan(make_profile(2), Cluster(machines=machines), batch_size=30, num_stages=1)
    shares = {p.stages[0].worker_index: p.num_micro_batches for p in choice.plan.pipelines}
    size = choice.plan.micro_batch_size
    assert [shares[worker] * size for worker in range(4)] == pytest.approx([5, 5, 10, 10], abs=size)
    assert choice.prediction.step_s < 30 / 4 / 0.5 * 6


def test_left_over_workers_are_used_where_that_is_faster():
    """11 workers, 12 sections, memory for four: 3 pipelines of 3 stages leave 2 workers, which two can use."""
    profile = make_profile(12, device_memory_bytes=25_000)
    choice = choose_plan(profile, Cluster.parse("1x11"), batch_size=220)
    check(choice, profile, Cluster.parse("1x11"), 220)
    assert sorted(len(pipeline.stages) for pipeline in choice.plan.pipelines) == [3, 4, 4]
    assert "spare" not in choice.reason
    fixed = choose_plan(profile, Cluster.parse("1x11"), batch_size=220, num_stages=3)
    assert choice.prediction.step_s < fixed.prediction.step_s


def test_shares_go_by_speed_and_sum_up():
    rng = random.Random(0)
    for _ in range(200):
        kinds = rng.randint(1, 3)
        counts = [rng.randint(1, 5) for _ in range(kinds)]
        each = [rng.uniform(0.5, 3) for _ in range(kinds)]
        rest = [rng.uniform(0, 5) for _ in range(kinds)]
        total = sum(counts) + rng.randint(0, 60)
        shares = share_out(total, counts, each, rest)
        assert sum(n * c for n, c in zip(shares.most, counts, strict=True)) - shares.num_fewer == total
        assert min(shares.most) >= 1
        last = max(r + e * n for r, e, n in zip(rest, each, shares.most, strict=True))
        busiest = max((r + e * n, i) for i, (r, e, n) in enumerate(zip(rest, each, shares.most, strict=True)))[
            1
        ]
        if shares.most[busiest] > 1 and kinds > 1:  # taking one from each of the last to finish is not enough
            fewer = [max(1, int((last - 1e-6 - r) / e)) for r, e in zip(rest, each, strict=True)]
            assert sum(n * c for n, c in zip(fewer, counts, strict=True)) < total


def test_replicas_share_a_machine_where_reductions_are_dear():
    """Large parameters, hardly any activations, slow network: sums stay inside, messages go across."""
    sections = tuple(
        make_section(index, [make_costs(1, output_bytes=1, gradient_bytes=1)], gradient_bytes=10**8)
        for index in range(2)
    )
    slow = LinkProfile(latency_s=0.0, bytes_per_s=10**7)
    profile = make_profile(2, sections=sections, across_machines=slow)
    choice = choose_plan(profile, Cluster.parse("2x4"), batch_size=64, num_stages=2)
    assert choice.candidates[0].layout == "replicas"
    assert {tuple(w.worker_index // 4 for w in p.stages) for p in choice.plan.pipelines} == {(0, 1)}
    large = tuple(
        make_section(index, [make_costs(1, output_bytes=10**7, gradient_bytes=10**7)], gradient_bytes=10)
        for index in range(2)
    )
    choice = choose_plan(replace(profile, sections=large), Cluster.parse("2x4"), batch_size=64, num_stages=2)
    assert choice.candidates[0].layout == "pipelines"


def test_jitter_is_drawn_several_times():
    jittered = LinkProfile(latency_s=0.1, bytes_per_s=10**9, jitter_s=(0.0, 0.5, 3.0))
    profile = make_profile(4, within_machine=jittered)
    choice = choose_plan(profile, Cluster.parse("1x4"), batch_size=32, num_stages=4)
    check(choice, profile, Cluster.parse("1x4"), 32)
    assert (
        choice.prediction.step_s
        > choose_plan(make_profile(4), Cluster.parse("1x4"), batch_size=32, num_stages=4).prediction.step_s
    )


# --- the table ------------------------------------------------------------------------------


def test_the_reason_names_the_plan_and_the_next_best():
    choice = choose_plan(make_profile(8), Cluster.parse("1x4"), batch_size=64, num_stages=4)
    assert "4 stages x 1 pipeline," in choice.reason
    assert "stages as asked for" in choice.reason
    assert "Next best: " in choice.reason
    assert choice.to_plan_choice().reason == choice.reason


def test_the_table_says_why_each_is_not_chosen():
    profile = make_profile(8, device_memory_bytes=14_000)
    rows = choose_plan(profile, Cluster.parse("2x4"), batch_size=64).candidates
    assert {row.num_stages for row in rows} == set(range(1, 9))
    for row in rows[1:]:
        if row.step_s == inf:
            assert row.rejected.startswith("does not fit")
        else:
            assert "slower" in row.rejected or row.rejected in ("as fast", "cannot be faster")
            assert row.simulated == (row.bubble is not None)
    assert any("parameters, gradients and optimizer alone take" in row.rejected for row in rows)
    assert rows[0].communication_s is not None
    assert rows[0].memory_bytes > 0


def test_what_is_simulated_is_what_whole_plans_are_predicted_to_take() -> None:
    profile, cluster = load_profile("gpt2-355m@h100"), Cluster.parse("13x8")  # machines share a slow link
    choice = choose_plan(profile, cluster, batch_size=4096)
    setting = Setting(profile, cluster, Wish(batch_size=4096))
    search = Search(setting=setting, maker=PointMaker(setting))
    search.run()
    assert len(search.outcomes) >= 5
    for outcome in search.outcomes:
        predicted = predict(plan_of(outcome.laid, setting), profile, cluster, num_runs=5)
        assert outcome.step_s == pytest.approx(predicted.step_s, rel=0.05)
    assert choice.prediction.step_s <= min(outcome.step_s for outcome in search.outcomes) * 1.05
