"""The compiled event loop against the plain one, over random pipelines, and what only the compiled one has."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from varuna.plan import SCHEDULES, TaskKind, pipeline_schedules
from varuna.plan.kernel import NUM_KINDS
from varuna.plan.pipeline import (
    NO_DELAYS,
    PipelineArrays,
    draw_delays,
    fast_makespan,
    rules_of,
    run_pipeline,
)
from varuna.plan.schedule import TASK_KINDS
from varuna.plan.simulate import simulate_step

_settings = settings(max_examples=60, deadline=None, derandomize=True)


def make_arrays(schedules, *, durations_s=None, latency_s=0.0, **changes):
    num_stages = len(schedules)
    if durations_s is None:
        durations_s = np.ones((num_stages, 2, NUM_KINDS))
    arrays = PipelineArrays(
        num_micro_batches=schedules[0].num_micro_batches,
        rules=rules_of(schedules),
        durations_s=durations_s,
        transmit_s=np.zeros((num_stages, 2, 2)),
        latency_s=np.broadcast_to(latency_s, (num_stages, 2)).copy(),
        send_s=np.zeros((num_stages, 2)),
        delays_s=NO_DELAYS,
        start_s=np.zeros(num_stages),
        kept_bytes=np.zeros((num_stages, 3)),
    )
    return replace(arrays, **changes)


def make_schedules(name, num_stages, num_micro_batches, *, recompute=False):
    return pipeline_schedules(
        name,
        num_stages=num_stages,
        num_micro_batches=num_micro_batches,
        recompute=[recompute] * num_stages,
    )


@pytest.mark.parametrize("name", SCHEDULES)
@given(
    num_micro_batches=st.integers(1, 40),
    mask=st.lists(st.booleans(), min_size=1, max_size=16),
    spread=st.sampled_from([0.0, 0.1, 3.0]),
    seed=st.integers(0, 2**32),
)
@_settings
def test_equals_the_plain_event_loop(name, num_micro_batches, mask, spread, seed):
    num_stages = len(mask)
    schedules = pipeline_schedules(
        name, num_stages=num_stages, num_micro_batches=num_micro_batches, recompute=mask
    )
    generator = np.random.default_rng(seed)
    durations_s = generator.uniform(0.01, 1.0, (num_stages, 2, NUM_KINDS))
    delays_s = generator.uniform(0.0, spread, (num_stages, 2, num_micro_batches))
    latency_s = generator.uniform(0.0, spread, (num_stages, 2))
    run = run_pipeline(
        make_arrays(schedules, durations_s=durations_s, delays_s=delays_s, latency_s=latency_s), record=True
    )
    plain = simulate_step(
        schedules,
        duration_s=lambda stage, task: durations_s[
            stage, int(task.micro_batch_index == num_micro_batches - 1), TASK_KINDS.index(task.kind)
        ],
        latency_s=lambda stage, task: (
            latency_s[stage, int(task.kind is TaskKind.BACKWARD)]
            + delays_s[stage, int(task.kind is TaskKind.BACKWARD), task.micro_batch_index]
        ),
    )
    assert run.makespan_s == pytest.approx(plain.makespan_s)
    assert tuple(run.peak_in_flight) == plain.peak_in_flight
    assert tuple(run.peak_recomputed) == plain.peak_recomputed
    assert tuple(run.peak_held) == plain.peak_held
    for spans, timeline in zip(run.spans, plain.timelines, strict=True):
        assert [span.task for span in spans] == [span.task for span in timeline]
        assert [span.start_s for span in spans] == pytest.approx([span.start_s for span in timeline])
        assert [span.end_s for span in spans] == pytest.approx([span.end_s for span in timeline])
    assert run.busy_s == pytest.approx(
        [sum(span.end_s - span.start_s for span in timeline) for timeline in plain.timelines]
    )
    assert run.end_s == pytest.approx([timeline[-1].end_s for timeline in plain.timelines])


def test_a_channel_sends_one_message_after_the_other():
    """Forwards take 1, each message occupies its channel for 4: the second stage gets one every 4."""
    schedules = make_schedules("gpipe", 2, 3)
    arrays = make_arrays(schedules, transmit_s=np.full((2, 2, 2), 4.0), latency_s=0.5)
    starts = [span.start_s for span in run_pipeline(arrays, record=True).spans[1]]
    assert starts[:3] == pytest.approx([5.5, 9.5, 13.5])


def test_sending_keeps_the_sender_from_computing():
    schedules = make_schedules("gpipe", 2, 2)
    arrays = make_arrays(schedules, send_s=np.full((2, 2), 0.25))
    first, second = run_pipeline(arrays, record=True).spans
    assert [span.start_s for span in first] == pytest.approx([0.0, 1.25, 4.25, 5.5])
    assert [span.start_s for span in second] == pytest.approx([1.0, 2.25, 3.25, 4.5])


def test_stages_may_begin_later():
    arrays = make_arrays(make_schedules("gpipe", 3, 1), start_s=np.array([2.0, 0.0, 4.5]))
    first, second, third = run_pipeline(arrays, record=True).spans
    assert [timeline[0].start_s for timeline in (first, second, third)] == pytest.approx([2.0, 3.0, 4.5])


def test_the_last_micro_batch_may_be_short():
    schedules = make_schedules("gpipe", 1, 3)
    durations_s = np.ones((1, 2, NUM_KINDS))
    durations_s[:, 1] = 0.5
    assert fast_makespan(make_arrays(schedules, durations_s=durations_s)) == pytest.approx(2 * 2 + 2 * 0.5)


def test_peak_bytes_are_those_of_one_moment():
    """One stage, three sets: a backward frees what is in flight and leaves what its weight task needs."""
    schedules = make_schedules("zero-bubble", 1, 8)
    run = run_pipeline(make_arrays(schedules, kept_bytes=np.array([[100.0, 0.0, 30.0]])), record=True)
    assert (run.peak_in_flight[0], run.peak_held[0]) == (1, 3)
    assert " ".join(str(span.task) for span in run.spans[0][:8]) == "F0 B0 F1 B1 F2 B2 W0 F3"
    assert run.peak_bytes[0] == 100 + 2 * 30  # while B2 runs


def test_waiting_messages_are_counted():
    schedules = make_schedules("gpipe", 2, 4)
    durations_s = np.ones((2, 2, NUM_KINDS))
    durations_s[1] = 3.0
    run = run_pipeline(make_arrays(schedules, durations_s=durations_s))
    assert run.peak_waiting.tolist() == [[0, 1], [2, 0]]


def test_delays_follow_their_quantiles_and_their_seed():
    quantiles = [(0.0, 1.0, 10.0), (), (), (5.0,)]
    delays_s = draw_delays(quantiles, 20_000, seed=3)
    assert delays_s.shape == (2, 2, 20_000)
    assert np.quantile(delays_s[0, 0], [0.25, 0.5, 0.75]) == pytest.approx([0.5, 1.0, 5.5], rel=0.1)
    assert not delays_s[0, 1].any()
    assert not delays_s[1, 0].any()
    assert set(delays_s[1, 1]) == {5.0}
    assert (delays_s == draw_delays(quantiles, 20_000, seed=3)).all()
    assert (delays_s != draw_delays(quantiles, 20_000, seed=4)).any()


def test_stages_that_wait_for_each_other_are_shown():
    rules = rules_of(make_schedules("gpipe", 2, 2))
    rules[0, 0] = 1  # the first stage wants a gradient after one forward, the second gives none before two
    with pytest.raises(AssertionError, match="wait for each other"):
        run_pipeline(make_arrays(make_schedules("gpipe", 2, 2), rules=rules))


def test_spans_do_not_overlap_and_are_not_kept_unless_asked_for():
    arrays = make_arrays(make_schedules("varuna", 4, 8, recompute=True), latency_s=0.1)
    for spans in run_pipeline(arrays, record=True).spans:
        assert all(now.end_s <= later.start_s + 1e-9 for now, later in pairwise(spans))
    assert run_pipeline(arrays).spans == ()


def test_planning_without_simulation_needs_no_numba():
    code = "import sys, varuna.plan, varuna.run.engine; sys.exit('numba' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
