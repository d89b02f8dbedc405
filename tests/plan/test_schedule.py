from __future__ import annotations

import subprocess
import sys

import pytest

from varuna.errors import PlanError
from varuna.plan import StageState, Task, TaskKind, next_task, stage_schedule


def make(name="varuna", **changes):
    arguments = {"num_stages": 4, "stage_index": 1, "num_micro_batches": 8, "recompute": [False] * 4}
    return stage_schedule(name, **(arguments | changes))


def run(state, kind, index):
    task = next_task(state)
    assert task == Task(kind, index)
    state.finish(task)


F, R, B, W = TaskKind.FORWARD, TaskKind.RECOMPUTE, TaskKind.BACKWARD, TaskKind.WEIGHT


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"name": "zigzag"}, ["'zigzag'", "varuna, 1f1b, gpipe, zero-bubble"]),
        ({"stage_index": 4}, ["Stage 4", "4 stages"]),
        ({"num_stages": 0}, ["0 stages"]),
        ({"num_micro_batches": 0}, ["num_micro_batches=0", "fewer pipelines"]),
        ({"recompute": [True]}, ["1 entries", "4 stages"]),
        ({"max_in_flight": -1}, ["max_in_flight=-1"]),
        ({"name": "gpipe", "max_in_flight": 7}, ["'gpipe'", "8", "max_in_flight=7", "'varuna'"]),
        ({"name": "1f1b", "max_in_flight": 2}, ["'1f1b'", "3", "max_in_flight=2"]),
    ],
)
def test_errors_say_values_and_what_to_do(changes, words):
    with pytest.raises(PlanError) as error:
        make(**changes)
    for word in words:
        assert word in str(error.value)


def test_fixed_orders():
    assert " ".join(map(str, make("gpipe", num_micro_batches=3).order)) == "F0 F1 F2 B0 B1 B2"
    assert (
        " ".join(map(str, make("1f1b", stage_index=2, num_micro_batches=4).order)) == "F0 F1 B0 F2 B1 F3 B2 B3"
    )
    order = make("1f1b", stage_index=2, num_micro_batches=3, recompute=[True] * 4).order
    assert " ".join(map(str, order)) == "F0 F1 R0 B0 F2 R1 B1 R2 B2"
    assert make("varuna").order == ()


@pytest.mark.parametrize(
    ("name", "recomputes"), [("varuna", False), ("1f1b", False), ("gpipe", True), ("zero-bubble", False)]
)
def test_last_stage_recomputes_only_where_backward_does_not_follow_at_once(name, recomputes):
    assert make(name, stage_index=3, recompute=[True] * 4).recompute is recomputes
    assert make(name, stage_index=0, recompute=[True] * 4).recompute is True


def test_limits():
    assert [make("varuna", stage_index=i, num_micro_batches=64).max_in_flight for i in range(4)] == [
        10,
        8,
        6,
        1,
    ]
    assert [make("1f1b", stage_index=i).max_in_flight for i in range(4)] == [4, 3, 2, 1]
    assert make("gpipe").max_in_flight == 8
    assert make("varuna", max_in_flight=5).max_in_flight == 5
    assert make("varuna", max_in_flight=5, stage_index=3).max_in_flight == 1
    assert make("varuna", max_in_flight=500).max_in_flight == 8


def held(**changes):
    return [make("zero-bubble", num_micro_batches=64, stage_index=i, **changes).max_held for i in range(4)]


def test_limits_of_sets_of_activations():
    assert held() == [8, 8, 8, 8]
    assert held(recompute=[True] * 4) == [2, 3, 4, 4]
    assert held(recompute=[False, False, True, False]) == [8, 8, 4, 4]  # the last stage saves where others do
    assert held(max_in_flight=5) == [5, 5, 5, 5]
    assert held(max_in_flight=5, recompute=[True] * 4) == [2, 3, 4, 4]
    assert make("zero-bubble", num_micro_batches=3).max_held == 3
    assert [make("zero-bubble", num_micro_batches=64, stage_index=i).max_in_flight for i in range(4)] == [
        10,
        8,
        6,
        1,
    ]
    assert make("varuna").max_held == 0


def test_first_stage_has_all_activations_and_last_its_own_gradient():
    state = StageState(make(num_stages=1, stage_index=0, recompute=[True], num_micro_batches=2))
    for kind, index in [(F, 0), (B, 0), (F, 1), (B, 1)]:
        assert not state.is_done
        run(state, kind, index)
    assert state.is_done
    assert next_task(state) is None


def test_strict_order_waits_though_other_work_is_there():
    state = StageState(make("1f1b", stage_index=2))
    state.activations_arrived = 8
    run(state, F, 0)
    run(state, F, 1)
    assert next_task(state) is None
    state.gradients_arrived = 1
    run(state, B, 0)
    run(state, F, 2)
    assert next_task(state) is None


def test_varuna_fills_a_late_gradient_with_forwards_up_to_its_limit():
    state = StageState(make(stage_index=2, max_in_flight=5))
    state.activations_arrived = 8
    for index in range(5):
        run(state, F, index)
    assert next_task(state) is None
    state.gradients_arrived = 1
    run(state, B, 0)


def test_varuna_keeps_later_stages_fed_then_prefers_backwards():
    state = StageState(make(stage_index=2, max_in_flight=6))  # low_in_flight is 4
    state.activations_arrived = 8
    state.gradients_arrived = 3
    for index in range(4):
        run(state, F, index)
    run(state, B, 0)
    run(state, F, 4)
    run(state, B, 1)


def test_varuna_recomputes_ahead_of_a_late_gradient_and_only_one():
    state = StageState(make(stage_index=2, recompute=[True] * 4))
    assert next_task(state) is None
    state.activations_arrived = 2
    run(state, F, 0)
    run(state, F, 1)
    run(state, R, 0)
    assert next_task(state) is None
    state.activations_arrived = 3
    run(state, F, 2)
    state.gradients_arrived = 2
    run(state, B, 0)
    run(state, R, 1)
    run(state, B, 1)
    run(state, R, 2)
    assert next_task(state) is None


def test_zero_bubble_puts_weight_tasks_off_until_it_would_wait():
    state = StageState(make("zero-bubble", stage_index=2, num_micro_batches=3))
    state.activations_arrived = 2
    state.gradients_arrived = 1
    run(state, F, 0)
    run(state, F, 1)
    run(state, B, 0)
    run(state, W, 0)
    assert next_task(state) is None
    state.gradients_arrived = 2
    state.activations_arrived = 3
    run(state, F, 2)
    run(state, B, 1)
    assert (state.num_in_flight, state.num_held) == (1, 2)
    state.gradients_arrived = 3
    run(state, B, 2)
    assert not state.is_done
    run(state, W, 1)
    run(state, W, 2)
    assert state.is_done
    assert next_task(state) is None


def test_zero_bubble_makes_room_for_a_set_of_activations():
    state = StageState(make("zero-bubble", stage_index=2, max_in_flight=2))
    state.activations_arrived = 4
    state.gradients_arrived = 1
    run(state, F, 0)
    run(state, F, 1)
    run(state, B, 0)
    run(state, W, 0)  # two sets: the third forward needs the room of the first
    run(state, F, 2)


def test_zero_bubble_with_recompute_counts_recomputed_sets():
    state = StageState(make("zero-bubble", stage_index=0, recompute=[True] * 4))
    state.gradients_arrived = 3
    for index in range(6):  # low_in_flight
        run(state, F, index)
    for index in range(2):
        run(state, R, index)
        run(state, B, index)
        run(state, F, 6 + index)
    assert state.num_held == state.schedule.max_held == 2
    run(state, W, 0)
    run(state, R, 2)


def test_a_task_out_of_turn_is_our_own_bug():
    state = StageState(make())
    with pytest.raises(AssertionError, match="F1 after 0 forwards"):
        state.finish(Task(F, 1))


def test_state_shows_itself():
    state = StageState(make())
    assert "varuna, stage 1 of 4, N=8, done F=0 R=0 B=0" in repr(state)


def test_no_torch():
    code = "import sys, varuna.plan; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
