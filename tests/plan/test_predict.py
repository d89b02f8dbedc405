from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.plan.profiles import FREE, make_costs, make_plan, make_profile, make_section
from varuna.errors import PlanError
from varuna.plan import SCHEDULES
from varuna.plan.cluster import Cluster, Machine
from varuna.plan.memory import BUCKET_BYTES, resident_bytes, stage_memory_bytes
from varuna.plan.predict import predict
from varuna.plan.profile import LinkProfile, Tie

ONE = Cluster.parse("1x64")
MANY = Cluster.parse("64")


# --- pipelines ----------------------------------------------------------------------------------


@pytest.mark.parametrize("schedule", ["varuna", "1f1b", "gpipe"])
def test_even_stages_and_free_links_give_the_closed_form(schedule):
    prediction = predict(make_plan([[0, 1, 2, 3, 4]], [8], schedule=schedule), make_profile(), ONE)
    assert prediction.step_s == pytest.approx((8 + 3) * 3.0)
    assert prediction.samples_per_s == pytest.approx(8 / 33)
    assert prediction.bubble == pytest.approx(3 / 11)
    assert prediction.reduce_s == 0.0
    (pipeline,) = prediction.pipelines
    assert pipeline.makespan_s == pytest.approx(33.0)
    assert [stage.worker_index for stage in pipeline.stages] == [0, 1, 2, 3]
    assert [stage.busy_s for stage in pipeline.stages] == pytest.approx([24.0] * 4)
    if schedule == "1f1b":
        assert [stage.peak_in_flight for stage in pipeline.stages] == [4, 3, 2, 1]


def test_zero_bubble_splits_the_backward():
    prediction = predict(make_plan([[0, 1, 2, 3, 4]], [8], schedule="zero-bubble"), make_profile(), ONE)
    assert prediction.step_s == pytest.approx(8 * 3.0 + 3)


def test_a_split_backward_takes_longer_by_what_was_measured():
    sections = tuple(make_section(index, [make_costs(1, split_s=0.25)]) for index in range(4))
    plan = [[0, 1, 2, 3, 4]], [8]
    split = predict(make_plan(*plan, schedule="zero-bubble"), make_profile(sections=sections), ONE)
    assert [stage.busy_s for stage in split.pipelines[0].stages] == pytest.approx([8 * 3.25] * 4)
    whole = predict(make_plan(*plan, schedule="1f1b"), make_profile(sections=sections), ONE)
    assert whole.step_s == pytest.approx((8 + 3) * 3.0)


def test_overheads_of_tasks_and_of_the_step():
    profile = make_profile(task_overhead_s=0.5, step_overhead_s=7.0)
    assert predict(make_plan([[0, 4]], [3]), profile, ONE).step_s == pytest.approx(3 * (12 + 2 * 0.5) + 7)


def test_a_short_last_micro_batch_and_uneven_shares():
    plan = make_plan([[0, 4], [0, 4]], [2, 1], micro_batch_size=4, batch_size=9)
    first, second = predict(plan, make_profile(), ONE).pipelines
    assert first.makespan_s == pytest.approx(2 * 4 * 12.0)
    assert second.makespan_s == pytest.approx(12.0)


def test_unlike_pipelines_and_devices():
    plan = make_plan([[0, 4], [0, 2, 4]], [1, 1])
    machines = (Machine(name="slow", num_workers=1, speed=0.5), Machine(name="fast", num_workers=2, speed=2.0))
    first, second = predict(plan, make_profile(), Cluster(machines=machines)).pipelines
    assert first.makespan_s == pytest.approx(24.0)
    assert second.makespan_s == pytest.approx(6.0)


def test_links_by_where_workers_are():
    across = LinkProfile(latency_s=3.0, bytes_per_s=20.0)
    profile = make_profile(across_machines=across)
    plan = make_plan([[0, 2, 4]], [1])
    assert predict(plan, profile, ONE).step_s == pytest.approx(12.0)
    assert predict(plan, profile, MANY).step_s == pytest.approx(12.0 + 2 * (3.0 + 0.5))


def test_sending_keeps_the_sender_from_computing():
    profile = make_profile(within_machine=replace(FREE, send_s=0.5))
    plan = make_plan([[0, 2, 4]], [4], schedule="gpipe")
    # the first stage's forwards come 2.5 apart, the second's backwards 4.5, the last of them needs no answer
    assert predict(plan, profile, ONE).step_s == pytest.approx(4 * 2.5 - 0.5 + 2 + 4 * 4.5 - 0.5 + 4)


def test_streams_that_leave_one_machine_share_its_link():
    """Two pipelines, first stages on one machine and last ones on another; messages take 20 s alone."""
    alone = LinkProfile(latency_s=0.0, bytes_per_s=0.5)
    plan = make_plan([[0, 2, 4], [0, 2, 4]], [6, 6], schedule="gpipe")
    plan = replace(plan, pipelines=tuple(_across(pipeline, i) for i, pipeline in enumerate(plan.pipelines)))
    cluster = Cluster.parse("2x2")
    own = predict(plan, make_profile(across_machines=alone), cluster).step_s
    wide = replace(alone, shared_bytes_per_s=1.0)
    narrow = replace(alone, shared_bytes_per_s=0.5)
    assert predict(plan, make_profile(across_machines=wide), cluster).step_s == pytest.approx(own)
    shared = predict(plan, make_profile(across_machines=narrow), cluster).step_s
    assert shared == pytest.approx(own + 2 * 6 * 20.0)
    rare = make_profile(across_machines=replace(narrow, bytes_per_s=1e9, shared_bytes_per_s=1e9))
    free = predict(plan, make_profile(), cluster).step_s
    assert predict(plan, rare, cluster).step_s == pytest.approx(free)


@pytest.mark.parametrize(("speed", "slowdown"), [(1.0, 2.0), (2.0, 2.0), (0.5, 4 / 3)])
def test_streams_share_by_how_often_they_send(speed, slowdown):
    """A message takes 3 s alone; a stage works 6 s on a micro-batch, a fast one 3 s, a slow one 12 s."""
    plan = make_plan([[0, 2, 4], [0, 2, 4]], [1, 1])
    plan = replace(plan, pipelines=tuple(_across(pipeline, i) for i, pipeline in enumerate(plan.pipelines)))
    link = LinkProfile(latency_s=0.0, bytes_per_s=10 / 3, shared_bytes_per_s=10 / 3)
    machines = tuple(Machine(name=name, num_workers=2, speed=speed) for name in "ab")
    prediction = predict(plan, make_profile(across_machines=link), Cluster(machines=machines))
    assert prediction.pipelines[0].makespan_s == pytest.approx(12 / speed + 2 * 3.0 * slowdown, rel=1e-4)


def _across(pipeline, index):
    """First stages on workers 0 and 1, last ones on 2 and 3."""
    stages = tuple(
        replace(stage, worker_index=2 * stage_index + index)
        for stage_index, stage in enumerate(pipeline.stages)
    )
    return replace(pipeline, stages=stages)


def test_jitter_is_drawn_anew_for_each_run_and_repeats_with_its_seed():
    profile = make_profile(within_machine=replace(FREE, jitter_s=(0.0, 1.0, 5.0)))
    plan = make_plan([[0, 1, 2, 3, 4]] * 3, [8, 8, 8], schedule="varuna")
    first = predict(plan, profile, ONE, seed=1)
    assert first == predict(plan, profile, ONE, seed=1)
    assert first.step_s != predict(plan, profile, ONE, seed=2).step_s
    assert len({pipeline.makespan_s for pipeline in first.pipelines}) == 3
    many = [predict(plan, profile, ONE, seed=seed).step_s for seed in range(40)]
    mean = predict(plan, profile, ONE, seed=100, num_runs=40).step_s
    assert mean == pytest.approx(np.mean(many), abs=4 * np.std(many) / np.sqrt(40))


def test_spans_are_kept_if_asked_for():
    plan = make_plan([[0, 2, 4]], [2], schedule="zero-bubble")
    assert not any(stage.spans for stage in predict(plan, make_profile(), ONE).pipelines[0].stages)
    stages = predict(plan, make_profile(), ONE, record=True, num_runs=2).pipelines[0].stages
    assert " ".join(str(span.task) for span in stages[1].spans) == "F0 B0 F1 B1 W0 W1"
    assert stages[0].spans[0].start_s == 0.0


# --- reductions and update ----------------------------------------------------------------------

TEN = LinkProfile(latency_s=0.0, bytes_per_s=1000.0)
"""1000 bytes summed over two workers take a second."""


def test_gradients_of_sections_in_small_buckets_are_reduced_after_the_last_task():
    prediction = predict(make_plan([[0, 4], [0, 4]], [2, 2]), make_profile(within_machine=TEN), ONE)
    assert prediction.reduce_s == pytest.approx(4.0)
    assert prediction.step_s == pytest.approx(2 * 12 + 4.0)
    assert [pipeline.stages[0].reduce_s for pipeline in prediction.pipelines] == pytest.approx([4.0, 4.0])


def test_large_gradients_are_reduced_while_backward_goes_on():
    """A section's reduction takes 1.5 s, its part of the last backward 2: only that of the first is exposed."""
    size = 4 * BUCKET_BYTES
    sections = tuple(make_section(index, gradient_bytes=size, parameter_bytes=size) for index in range(4))
    link = LinkProfile(latency_s=0.0, bytes_per_s=size / 1.5)
    profile = make_profile(sections=sections, within_machine=link)
    prediction = predict(make_plan([[0, 4], [0, 4]], [2, 2]), profile, ONE)
    assert prediction.reduce_s == pytest.approx(1.5)
    slower = make_profile(sections=sections, within_machine=replace(link, bytes_per_s=size / 3.0))
    # one after the other from the time the last section is through, 6 s before the end
    assert predict(make_plan([[0, 4], [0, 4]], [2, 2]), slower, ONE).reduce_s == pytest.approx(4 * 3.0 - 6.0)


def test_without_a_core_to_spare_gradients_are_reduced_after_the_last_task():
    size = 4 * BUCKET_BYTES
    sections = tuple(make_section(index, gradient_bytes=size, parameter_bytes=size) for index in range(4))
    link = LinkProfile(latency_s=0.0, bytes_per_s=size / 1.5)
    profile = make_profile(sections=sections, within_machine=link, reduces_beside=False)
    assert predict(make_plan([[0, 4], [0, 4]], [2, 2]), profile, ONE).reduce_s == pytest.approx(4 * 1.5)


def test_a_short_last_backward_hides_less():
    size = 4 * BUCKET_BYTES
    sections = tuple(make_section(index, gradient_bytes=size, parameter_bytes=size) for index in range(2))
    profile = make_profile(
        sections=sections, within_machine=LinkProfile(latency_s=0.0, bytes_per_s=size / 100.0)
    )
    # the second pipeline ends last, and is through with its second section 2 s before, of one sample
    plan = make_plan([[0, 2], [0, 2]], [1, 2], micro_batch_size=4, batch_size=9)
    assert predict(plan, profile, ONE).reduce_s == pytest.approx(2 * 100.0 - 2.0)


def test_a_reduction_waits_for_its_last_holder():
    prediction = predict(make_plan([[0, 4], [0, 4]], [1, 3]), make_profile(within_machine=TEN), ONE)
    first, second = prediction.pipelines
    assert first.stages[0].reduce_s == pytest.approx(2 * 12 + 4.0)
    assert second.stages[0].reduce_s == pytest.approx(4.0)


def test_the_drain_hides_the_reductions_of_late_stages():
    """The last stage ends two backwards of 4 s before the first, so that its two seconds do not show."""
    plan = make_plan([[0, 2, 4], [0, 2, 4]], [2, 2], schedule="1f1b")
    prediction = predict(plan, make_profile(within_machine=replace(TEN, latency_s=0.0)), ONE)
    first, last = prediction.pipelines[0].stages
    assert first.reduce_s == pytest.approx(2.0)
    assert last.reduce_s == pytest.approx(2.0)
    assert prediction.reduce_s == pytest.approx(2.0)


def test_sections_with_unlike_holders_are_reduced_one_group_after_the_other():
    """Worker 0 holds all four sections, 1 and 2 two each: worker 0 takes part in both reductions."""
    plan = make_plan([[0, 4], [0, 2, 4]], [2, 2])
    sections = make_profile().sections
    profile = make_profile(sections=sections, within_machine=replace(TEN, bytes_per_s=100.0))
    prediction = predict(plan, profile, ONE)
    ends = [stage.spans[-1].end_s for stage in predict(plan, profile, ONE, record=True).pipelines[0].stages]
    assert prediction.step_s >= max(ends) + 20.0


def test_tied_parameters_are_summed_over_all_that_hold_them():
    profile = make_profile(
        ties=(Tie(name="embedding", num_bytes=1000, section_indices=(0, 3)),), within_machine=TEN
    )
    alone = predict(make_plan([[0, 4]], [2]), profile, ONE)
    assert alone.reduce_s == 0.0
    # one pipeline of two stages: only the tied parameter; messages of 10 bytes take a hundredth of a second
    prediction = predict(make_plan([[0, 2, 4]], [2]), profile, ONE)
    assert prediction.reduce_s == pytest.approx(1.0)
    # two pipelines of one stage: three sections' own gradients less the ties, and the tie once
    both = predict(make_plan([[0, 4], [0, 4]], [1, 1]), profile, ONE)
    assert both.reduce_s == pytest.approx(2.0 + 1.0)


def test_groups_that_leave_one_machine_share_its_link():
    plan = make_plan([[0, 2, 4], [0, 2, 4]], [1, 1])
    cluster = Cluster.parse("2x2")
    alone = predict(plan, make_profile(across_machines=TEN), cluster)
    shared = predict(plan, make_profile(across_machines=replace(TEN, shared_bytes_per_s=500.0)), cluster)
    assert alone.reduce_s == pytest.approx(2.0)
    assert shared.reduce_s == pytest.approx(8.0)


def test_a_worker_begins_when_its_own_update_is_done():
    sections = (
        make_section(0, update_s=1.0),
        make_section(1, [make_costs(1, output_bytes=0, gradient_bytes=0)], update_s=2.5),
    )
    profile = make_profile(sections=sections)
    # the second stage would begin 1 s after the first anyway: half a second shows
    prediction = predict(make_plan([[0, 1, 2]], [1]), profile, ONE)
    assert prediction.step_s == pytest.approx(1.0 + 6.0 + 0.5)
    assert predict(make_plan([[0, 2]], [1]), profile, ONE).step_s == pytest.approx(3.5 + 6.0)


# --- memory -------------------------------------------------------------------------------------


def stages_of(plan, profile=None):
    return predict(plan, profile or make_profile(), ONE).pipelines[0].stages


def test_memory_is_what_is_there_and_what_is_kept():
    stages = stages_of(make_plan([[0, 1, 2, 3, 4]], [8], schedule="1f1b"))
    resident = 1000 + 1000 + 2000
    # four sets; a gradient that arrived
    assert stages[0].peak_memory_bytes == resident + 4 * 100 + 10
    # one set and its input; one more input that waits; the gradient that is being sent
    assert stages[3].peak_memory_bytes == resident + 110 + 10 + 10


def test_recompute_keeps_inputs_and_one_set():
    stages = stages_of(make_plan([[0, 1, 2, 3, 4]], [8], schedule="1f1b", recompute=True))
    resident = 1000 + 1000 + 2000
    assert stages[0].peak_memory_bytes == resident + 100 + 10
    assert resident + 3 * 10 + 100 <= stages[1].peak_memory_bytes <= resident + 3 * 10 + 100 + 30


def test_zero_bubble_keeps_what_its_weight_tasks_need():
    profile = make_profile(1)
    (stage,) = stages_of(make_plan([[0, 1]], [8], schedule="zero-bubble"), profile)
    assert stage.peak_memory_bytes == 4000 + 100 + 2 * 40


@pytest.mark.parametrize("recompute", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_the_bound_for_the_search_is_not_below_the_prediction(name, recompute):
    profile = make_profile(8)
    plan = make_plan([[0, 2, 4, 6, 8]], [16], schedule=name, recompute=recompute)
    for index, stage in enumerate(stages_of(plan, profile)):
        bound = stage_memory_bytes(
            profile,
            2 * index,
            2 * index + 2,
            1,
            recompute=recompute and (index < 3 or name == "gpipe"),
            peak_in_flight=stage.peak_in_flight,
            peak_held=4 + 2 + 2 if name == "zero-bubble" else 0,
            peak_waiting=16,
        )
        assert stage.peak_memory_bytes <= bound


def test_resident_bytes_count_ties_once_and_a_bucket_where_gradients_are_reduced():
    profile = make_profile(
        runtime_bytes=7, ties=(Tie(name="embedding", num_bytes=500, section_indices=(0, 3)),)
    )
    assert resident_bytes(profile, 0, 2) == 7 + 2 * 4000
    assert resident_bytes(profile, 0, 4) == 7 + 4 * 4000 - 500 - 500 - 1000
    assert resident_bytes(profile, 0, 2, num_holders=2) == 7 + 2 * 4000 + 2000


# --- errors -------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((make_plan([[0, 3]], [1]), make_profile(), ONE), "3 sections"),
        ((make_plan([[0, 2, 4]], [1]), make_profile(), Cluster.parse("1")), "2 workers"),
    ],
)
def test_what_does_not_fit_together_is_refused(arguments, words):
    with pytest.raises(PlanError, match=words):
        predict(*arguments)


def test_at_least_one_run():
    with pytest.raises(PlanError, match="num_runs=0"):
        predict(make_plan([[0, 4]], [1]), make_profile(), ONE, num_runs=0)
