"""When a job saves, and when a save is complete: pure."""

from __future__ import annotations

from varuna.checkpoint.values import PartFailed, PartRecord, StoredTensor, Written
from varuna.config_checkpoint import CheckpointConfig
from varuna.persist.schedule import SaveSchedule
from varuna.persist.verdict import Action, Answer, judge
from varuna.run.call_log import CallLog


def written(*names: str, worker: str = "w0") -> Answer:
    tensors = tuple(
        StoredTensor(name=name, dtype="float32", shape=(1,), begin=0, end=4, crc32=0) for name in names
    )
    part = PartRecord(
        file=f"{worker}.safetensors",
        section_index=0,
        size_bytes=4,
        header_bytes=0,
        header_crc32=0,
        tensors=tensors,
        values={f"{name}/step": 1 for name in names},
    )
    return Answer(written=Written(save_id="a", worker=worker, parts=(part,), pause_s=0.0, write_s=0.0))


# --- schedule -------------------------------------------------------------------------------


def test_by_steps() -> None:
    schedule = SaveSchedule(CheckpointConfig(url="x", every_steps=5), 0.0)
    assert [step for step in range(1, 21) if schedule.is_due(step, 1e9, is_last=False)] == [5, 10, 15, 20]


def test_by_time() -> None:
    schedule = SaveSchedule(CheckpointConfig(url="x", every_s=60.0), 100.0)
    assert not schedule.is_due(7, 159.0, is_last=False)
    assert schedule.is_due(8, 160.0, is_last=False)
    schedule.saved(8, 161.0)
    assert not schedule.is_due(9, 220.0, is_last=False)


def test_the_end_of_a_call_is_saved_once() -> None:
    schedule = SaveSchedule(CheckpointConfig(url="x", every_steps=5), 0.0, step=7)
    assert not schedule.is_due(7, 0.0, is_last=True)
    assert schedule.is_due(8, 0.0, is_last=True)
    schedule.saved(8, 0.0)
    assert not schedule.is_due(8, 0.0, is_last=True)


# --- a save ---------------------------------------------------------------------------------


def test_it_waits_for_every_answer_and_then_commits() -> None:
    answers = {"0": written("p")}
    assert judge(answers, {"0", "1"}, {"p", "q"}).action is Action.WAIT
    answers["1"] = written("q", worker="w1")
    assert judge(answers, {"0", "1"}, {"p", "q"}).action is Action.COMMIT


def test_a_failure_gives_it_up_at_once_and_says_why() -> None:
    failed = Answer(failed=PartFailed(save_id="a", worker="w1", reason="OSError: disk full"))
    verdict = judge({"1": failed}, {"0", "1"}, {"p"})
    assert (verdict.action, verdict.reason) == (Action.GIVE_UP, "w1: OSError: disk full")


def test_what_a_dead_one_owed_may_be_in_its_own_last_answer() -> None:
    kept = Answer(lost=("q", "q/step"))
    assert judge({"0": written("p"), "0/1": kept}, {"0", "0/1"}, {"p"}).action is Action.GIVE_UP
    answers = {"0": written("p"), "1": written("q", worker="w1"), "0/1": kept}
    assert judge(answers, {"0", "0/1"}, {"p"}).action is Action.COMMIT


def test_parameters_that_nobody_wrote_give_it_up() -> None:
    verdict = judge({"0": written("p")}, {"0"}, {"p", "q"})
    assert verdict.action is Action.GIVE_UP
    assert "a worker was lost before it had written q" in verdict.reason


# --- calls ----------------------------------------------------------------------------------


def test_a_newcomer_passes_over_what_was_made_before_it() -> None:
    log = CallLog()
    first, _ = log.begin("train")
    assert log.end_of(first, 5) == 5
    log.leave(first, 3)
    log.begin("evaluate")
    second, _ = log.begin("train")
    assert log.end_of(second, 2) == 5
    newcomer = CallLog()
    newcomer.take(log.calls)
    assert newcomer.begin("train")[1]
    assert newcomer.begin("evaluate")[1]
    call, is_over = newcomer.begin("train")
    assert not is_over
    assert newcomer.end_of(call, 2) == 5
    third, _ = newcomer.begin("train")
    assert newcomer.end_of(third, 4) == 9


def test_a_newcomer_comes_to_a_loop_between_two_steps() -> None:
    log = CallLog()
    loop, _ = log.begin("train")
    log.end_of(loop, 20)
    log.in_loop = True
    log.begin("evaluate")
    log.begin("evaluate")
    log.in_loop = False
    newcomer = CallLog()
    newcomer.take(log.calls)
    assert newcomer.begin("train", 12) == (newcomer.calls[0], False)
    newcomer.in_loop = True
    made, _ = newcomer.begin("evaluate")
    assert made is newcomer.calls[3], "those before are over"
    log.begin("full_state_dict")
    late = CallLog()
    late.take(log.calls)
    assert late.begin("train", 20) == (late.calls[0], True)
    assert late.begin("full_state_dict") == (late.calls[3], False)


def test_a_resumed_script_counts_from_the_beginning() -> None:
    log = CallLog()
    first, _ = log.begin("train")
    log.end_of(first, 5)
    log.leave(first, 3)
    log.begin("evaluate")
    second, _ = log.begin("train")
    log.end_of(second, 4)
    again = CallLog()
    again.resume(log.train_calls)
    call, is_over = again.begin("train")
    assert (is_over, again.end_of(call, 5)) == (False, 3)
    assert again.begin("evaluate") == (again.calls[1], False)
    call, _ = again.begin("train")
    assert again.end_of(call, 6) == 9, "a call that is longer now goes on"
    assert [one.end_step for one in again.train_calls] == [3, 9]
