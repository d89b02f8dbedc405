"""A job that goes on when workers are killed, leave and join: equal to an undisturbed one to the last bits.

Real worker processes; faults happen at named points and must have fired.
"""

from __future__ import annotations

import dataclasses
import functools
import os
import signal
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch.distributed import PrefixStore, Store

from tests.cases import jobs, models
from tests.cases.jobs import Training
from tests.generations.scripted import Membership, ScriptedControl
from varuna.errors import PeerLost
from varuna.plan import simple_plan
from varuna.spec import Plan, SectionSpec
from varuna.testing.forked import WorkerOutcome, run_forked

NUM_STEPS = 8
NUM_SECTIONS = 5
TRAINING = Training(
    model=functools.partial(models.Tagger, states_weight=True, tied=True, dropout=0.3),
    dataset=models.text(),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.MultiStepLR(optimizer, [2, 5], gamma=0.5),
    batch_size=12,
    micro_batch_size=2,
    num_steps=NUM_STEPS,
    options={"clip_grad_norm": 0.5, "precision": "fp64"},
)
KILLED = -int(signal.SIGKILL)


def plan(num_workers: int, num_stages: int) -> Plan:
    sections = [
        SectionSpec(
            index=index,
            name=str(index),
            parameter_names=(),
            parameter_bytes=1,
            forward_flops=1.0,
            output_bytes=1,
        )
        for index in range(NUM_SECTIONS)
    ]
    return simple_plan(
        sections=sections, num_workers=num_workers, batch_size=12, num_stages=num_stages, micro_batch_size=2
    ).plan


def members(workers: Sequence[int], num_stages: int) -> Membership:
    return Membership(workers=tuple(workers), plan=plan(len(workers), num_stages))


def kill() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def lose() -> None:
    raise PeerLost("injected: this worker does not hear how the commit ended")


class Fault:
    """Something goes wrong when this worker comes to a point for the n-th time since a step began."""

    def __init__(self, point: str, step_index: int, count: int = 1, what: Callable[[], None] = kill) -> None:
        self.point, self.step_index, self.count, self.what = point, step_index, count, what
        self.has_fired = False
        self.now = -1
        self.seen = 0

    def at(self, point: str) -> None:
        if point == "step":
            self.now += 1
            self.seen = 0
        if point == self.point and self.now == self.step_index:
            self.seen += 1
            if self.seen == self.count and not self.has_fired:
                self.has_fired = True
                self.what()


def run(
    script: Sequence[Membership],
    *,
    faults: dict[int, Fault] | None = None,
    pause_after: dict[int, int] | None = None,
    training: Training = TRAINING,
) -> tuple[WorkerOutcome, ...]:
    """Every worker of the script in a process of its own; those of the first generation found the job."""
    workers = sorted({worker for one in script for worker in one.workers})
    captures = jobs._captures()

    def work(worker: int, store: Store) -> Any:
        control = ScriptedControl(PrefixStore("script", store), worker, script, pause_after=pause_after)
        os.environ["VARUNA_CACHE_DIR"] = str(captures)
        return _work(worker, store, control, (faults or {}).get(worker), training)

    return run_forked(len(workers), work, timeout_s=40.0)


def _work(worker: int, store: Store, control: ScriptedControl, fault: Fault | None, training: Training) -> Any:
    script = control.script
    founders = script[0].workers
    joins = worker not in founders
    os.environ.update(
        RANK=str(worker if joins else founders.index(worker)),
        WORLD_SIZE=str(max(len(founders), worker + 1)),
        LOCAL_RANK="0" if joins else str(founders.index(worker)),
        LOCAL_WORLD_SIZE=str(len(founders)),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(_port(store)),
        TORCHELASTIC_USE_AGENT_STORE="True",
        TORCHELASTIC_RUN_ID="generations",
        VARUNA_JOINS=str(int(joins)),
    )
    if not joins:
        os.environ["WORLD_SIZE"] = str(len(founders))
    training = dataclasses.replace(training, num_stages=len(script[0].plan.pipelines[0].stages))
    job, _ = training.job()
    job._control = control

    def at(point: str) -> None:
        if (
            fault is not None
            and fault.point == point
            and point in ("form", "transfer")
            and fault.now == fault.step_index
        ):
            control.dying()
        if point == "step":
            control.before_step(job.step_index)
        if fault is not None:
            fault.at(point)

    job._request = dataclasses.replace(job._request, job=dataclasses.replace(job._request.job, at=at))
    steps = [
        dataclasses.asdict(step) for step in job.train(1000 if joins else NUM_STEPS) if step.index < NUM_STEPS
    ]
    loss = job.evaluate(training.dataset, batch_size=4)
    state = job.full_state_dict()
    job.close()
    fired = fault is not None and fault.has_fired
    return {"steps": steps, "loss": loss, "state": jobs.encode(state), "fired": fired, "rank": job.rank}


def _port(store: Store) -> int:
    inner = store
    while isinstance(inner, PrefixStore):
        inner = inner.underlying_store
    return int(inner.port)


def final(outcomes: Sequence[WorkerOutcome], worker: int) -> dict[str, torch.Tensor]:
    value = outcomes[worker].value
    assert isinstance(value, dict), outcomes[worker].error
    state: dict[str, torch.Tensor] = jobs.decode(value["state"])
    return state


@functools.cache
def undisturbed() -> tuple[dict[str, torch.Tensor], list[dict[str, Any]]]:
    ran = jobs.train(TRAINING, num_workers=1)
    return ran.state, ran.steps


@functools.cache
def undisturbed_loss() -> float:
    """Of an evaluation after the last step."""
    value = run([members([0], 1)])[0].value
    assert isinstance(value, dict)
    return float(value["loss"])


def check_equal(outcomes: Sequence[WorkerOutcome], worker: int) -> None:
    """The state that ``worker`` gathered, and every step it saw, are those of the undisturbed run."""
    check_steps(outcomes, worker)
    state, _ = undisturbed()
    found = final(outcomes, worker)
    assert found.keys() == state.keys()
    for name, value in state.items():
        difference = (found[name] - value).abs().max() / value.abs().max().clamp_min(1e-30)
        assert difference <= 1e-12, (name, difference)
    losses = [outcome.value["loss"] for outcome in outcomes if isinstance(outcome.value, dict)]
    assert losses == pytest.approx([undisturbed_loss()] * len(losses), rel=1e-12)


def check_steps(outcomes: Sequence[WorkerOutcome], worker: int, *, first: int = 0) -> None:
    """The steps that a worker saw, from ``first`` on, each once, are those of the undisturbed run."""
    _, steps = undisturbed()
    value = outcomes[worker].value
    assert isinstance(value, dict), outcomes[worker].error
    seen = value["steps"]
    assert [step["index"] for step in seen] == list(range(first, NUM_STEPS))
    for mine, theirs in zip(seen, steps[first:], strict=True):
        for key in ("index", "weight", "num_samples", "lr", "skipped"):
            assert mine[key] == theirs[key], (key, mine, theirs)
        for key in ("loss", "grad_norm"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-12), (key, mine, theirs)


@pytest.mark.parametrize(
    ("point", "count"),
    [("step", 1), ("forward", 2), ("final backward", 1), ("reduce", 1), ("commit", 1), ("committed", 1)],
)
@pytest.mark.parametrize("victim", [1, 2])
def test_killed_without_notice(point: str, count: int, victim: int) -> None:
    """2 pipelines of 2 stages; one worker is killed at a point of step 3; the other three go on as 1 x 3."""
    rest = [worker for worker in range(4) if worker != victim]
    script = [members(range(4), 2), members(rest, 3)]
    outcomes = run(script, faults={victim: Fault(point, 3, count)})
    assert outcomes[victim].exit_code == KILLED
    check_equal(outcomes, 0)


def test_a_commit_that_some_did_not_hear_of_is_rolled_forward() -> None:
    """Worker 2's commit of step 3 completes on all others: nobody runs step 3 again."""
    script = [members(range(4), 2), members(range(4), 2)]
    fault = Fault("committed", 3, what=lose)
    outcomes = run(script, faults={2: fault})
    assert [outcome.value["fired"] for outcome in outcomes] == [False, False, True, False]
    for worker in range(4):
        check_steps(outcomes, worker)
    check_equal(outcomes, 0)


def test_two_killed_at_once() -> None:
    script = [members(range(4), 2), members([0, 3], 2)]
    outcomes = run(script, faults={1: Fault("final backward", 2), 2: Fault("reduce", 2)})
    assert [outcomes[worker].exit_code for worker in (1, 2)] == [KILLED, KILLED]
    check_equal(outcomes, 0)


@pytest.mark.parametrize(("point", "second"), [("form", 0), ("transfer", 2)])
def test_killed_while_a_generation_forms(point: str, second: int) -> None:
    """Worker 1 dies in step 2, another while the next generation is formed; the rest holds everything."""
    rest = [worker for worker in (0, 2, 3) if worker != second]
    script = [members(range(4), 2), members([0, 3, 2], 3), members(rest, 2)]
    outcomes = run(script, faults={1: Fault("reduce", 2), second: Fault(point, 2)})
    assert [outcomes[worker].exit_code for worker in (1, second)] == [KILLED, KILLED]
    check_equal(outcomes, rest[0])


def test_a_giver_is_killed_and_the_last_copy_is_one_that_was_to_be_given_up() -> None:
    """Workers 1 and 3 hold the last sections; 1 is to give some to 2 and dies, 3 does not need them now."""
    script = [members(range(4), 2), members([0, 3, 1, 2], 4), members([0, 2, 3], 3)]
    outcomes = run(script, faults={1: Fault("transfer", 2)}, pause_after={0: 2})
    assert outcomes[1].exit_code == KILLED
    check_equal(outcomes, 0)


def test_worker_0_may_go_and_another_becomes_worker_0() -> None:
    script = [members(range(4), 2), members([3, 1, 2], 3)]
    outcomes = run(script, faults={0: Fault("forward", 4, 2)})
    assert outcomes[0].exit_code == KILLED
    check_equal(outcomes, 3)


def test_notice_and_join_at_the_end_of_a_step() -> None:
    """After step 1 worker 2 leaves in order; after step 3 worker 4 joins, and after step 5 worker 5."""
    script = [
        members(range(4), 2),
        members([0, 1, 3], 1),
        members([0, 1, 3, 4], 4),
        members([0, 1, 3, 4, 5], 5),
    ]
    outcomes = run(script, pause_after={0: 1, 1: 3, 2: 5})
    assert outcomes[2].exit_code == 0
    check_equal(outcomes, 0)
    check_steps(outcomes, 1)
    check_steps(outcomes, 4, first=4)
    check_steps(outcomes, 5, first=6)


def test_down_to_one_worker_and_back_to_four() -> None:
    """P and D both change; the newcomers learn learning rates and optimizer state from one worker."""
    # one stage: every worker holds every section, so that no state is lost with three of them
    script = [members(range(4), 1), members([2], 1), members([2, 4, 5, 6], 2)]
    faults = {worker: Fault("forward", 2, 1) for worker in (0, 1, 3)}
    outcomes = run(script, faults=faults, pause_after={1: 4})
    check_equal(outcomes, 2)
    for worker in (4, 5, 6):
        check_steps(outcomes, worker, first=5)
