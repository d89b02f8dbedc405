"""A job that is started again: which steps it makes, what it brings back, and what it refuses."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from torch import nn

import varuna
from tests.cases import jobs, models
from tests.cases.jobs import Training
from varuna import cli
from varuna.checkpoint.errors import StateError
from varuna.checkpoint.find import open_save, saves_in
from varuna.checkpoint.store import open_store
from varuna.errors import ConfigError

ADAM = Training(
    model=functools.partial(models.Tagger, states_weight=True, tied=True, dropout=0.3),
    dataset=models.text(),
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=0.01),
    scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 2, gamma=0.5),
    batch_size=12,
    micro_batch_size=2,
    options={"precision": "fp64"},
)


class Counted:
    """An object of the user's: a tensor, a tuple, and a number that is none of JSON's."""

    def __init__(self) -> None:
        self.state: dict[str, Any] = {"sums": torch.zeros(3), "pair": (1, 2), "best": float("inf")}

    def state_dict(self) -> dict[str, Any]:
        return self.state

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.state = state


def saving(training: Training, place: Path, **options: Any) -> Training:
    checkpoint = varuna.Checkpoints(url=str(place), **{"every_steps": 100, **options})
    return replace(training, options={**training.options, "checkpoint": checkpoint})


def train_calls(training: Training, *counts: int, leave_after: int | None = None) -> dict[str, Any]:
    """Calls of ``train`` one after another; the first loop is left after some steps."""
    told: list[str] = []
    training = replace(
        training,
        options={**training.options, "progress": lambda event: told.append(getattr(event, "text", ""))},
    )
    job, _ = training.job()
    counted = Counted()
    job.register("counted", counted)
    calls = []
    with job:
        for count in counts:
            calls.append([])
            for step in job.train(count):
                calls[-1].append(dataclasses.asdict(step))
                counted.state["sums"] += step.loss
                counted.state["best"] = min(counted.state["best"], step.loss)
                all_saved(job)
                if len(calls) == 1 and len(calls[0]) == leave_after:
                    break
        state = job.full_state_dict()
    return {"calls": calls, "state": state, "sums": counted.state["sums"], "told": [one for one in told if one]}


def all_saved(job: varuna.Varuna) -> None:
    """Until nothing of a save is under way, so that none is left out because of the one before."""
    assert job._work is not None
    if job._work.checkpoints._saves is not None:
        job._work.checkpoints._saves.settle()


def run(training: Training, workers: int, *counts: int, **options: Any) -> dict[str, Any]:
    """What worker 0 saw."""
    body = functools.partial(train_calls, **options)
    return jobs.run_workers(workers, body, training, *counts)[0]


def indices(result: dict[str, Any]) -> list[list[int]]:
    return [[step["index"] for step in call] for call in result["calls"]]


def steps_in(place: Path) -> list[int]:
    store = open_store(str(place))
    return [order.step for order in saves_in(store) if open_save(store, order) is not None]


def test_lives_with_other_layouts_are_one_undisturbed_run(tmp_path: Path) -> None:
    """Every life makes two more steps and is saved at its end."""
    undisturbed = run(ADAM, 1, 8)
    steps: list[dict[str, Any]] = []
    for number, (stages, workers) in enumerate([(1, 4), (2, 4), (4, 4), (3, 3)]):
        training = replace(saving(ADAM, tmp_path), num_stages=stages)
        result = run(training, workers, 2 * number + 2)
        steps += result["calls"][0]
    assert [step["index"] for step in steps] == list(range(8))
    for mine, theirs in zip(steps, undisturbed["calls"][0], strict=True):
        assert mine["learning_rates"] == theirs["learning_rates"]
        assert mine["loss"] == pytest.approx(theirs["loss"], rel=1e-12)
    for name, value in undisturbed["state"].items():
        assert (result["state"][name] - value).abs().max() <= 1e-12 * value.abs().max().clamp_min(1e-30)
    torch.testing.assert_close(result["sums"], undisturbed["sums"])
    assert steps_in(tmp_path) == [8, 6, 4]


# --- which steps are made -------------------------------------------------------------------


def test_train_counts_from_the_first_step_of_the_first_life(tmp_path: Path) -> None:
    training = saving(ADAM, tmp_path)
    assert indices(run(training, 1, 3)) == [[0, 1, 2]]
    assert indices(run(training, 1, 3)) == [[]]
    assert indices(run(training, 1, 5)) == [[3, 4]]
    assert indices(run(training, 1, 2, 1, 4)) == [[], [], [5, 6]]


def test_a_loop_that_was_left_counts_with_the_steps_it_made(tmp_path: Path) -> None:
    training = saving(ADAM, tmp_path)
    assert indices(run(training, 1, 5, 3, leave_after=2)) == [[0, 1], [2, 3, 4]]
    assert indices(run(training, 1, 5, 6)) == [[], [5, 6, 7]]


def test_an_explicit_step_and_none_at_all(tmp_path: Path) -> None:
    run(saving(ADAM, tmp_path, every_steps=1, keep=10), 1, 3)
    assert indices(run(saving(ADAM, tmp_path, resume=1, keep=10), 1, 3)) == [[1, 2]]
    assert indices(run(saving(ADAM, tmp_path, resume="never", keep=10), 1, 2)) == [[0, 1]]
    assert steps_in(tmp_path)[0] == 2, "what was saved last is the newest, whatever its step"


# --- what comes back ------------------------------------------------------------------------


class Loud(models.Tagger):
    """Its gradients overflow in fp16 until the loss scale has come down."""

    dtype = torch.float32

    def forward(self, **batch: torch.Tensor) -> torch.Tensor:
        return super().forward(**batch) * 300.0


def test_the_loss_scale_goes_on_where_it_was(tmp_path: Path) -> None:
    training = replace(ADAM, model=functools.partial(Loud, states_weight=False), options={"precision": "fp16"})
    undisturbed = run(training, 1, 6)["calls"][0]
    assert undisturbed[0]["skipped"]
    first = run(saving(training, tmp_path), 1, 3)["calls"][0]
    rest = run(replace(saving(training, tmp_path), num_stages=2), 2, 6)["calls"][0]
    assert [one["loss_scale"] for one in [*first, *rest]] == [one["loss_scale"] for one in undisturbed]
    assert [one["lr"] for one in [*first, *rest]] == [one["lr"] for one in undisturbed]


def test_what_is_registered_on_one_side_only_is_told(tmp_path: Path) -> None:
    training = saving(ADAM, tmp_path)
    run(training, 1, 1)
    (result,) = jobs.run_workers(1, register_other, training)
    assert "it has state of counted, which this script does not register" in result["told"]
    assert "it has no state of other, which stays as the script made it" in result["told"]
    assert result["state"]["best"] == float("inf")


def register_other(training: Training) -> dict[str, Any]:
    told: list[str] = []
    options = {**training.options, "progress": lambda event: told.append(str(event))}
    job, _ = replace(training, options=options).job()
    other = Counted()
    job.register("other", other)
    with job:
        list(job.train(2))
    return {"told": "\n".join(told), "state": other.state}


# --- what is refused ------------------------------------------------------------------------


def begin(training: Training) -> str:
    job, _ = training.job()
    try:
        with job:
            list(job.train(2))
    except (StateError, ConfigError) as error:
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"batch_size": 8}, "batch_size was 12 and is 8"),
        ({"dataset": models.text(20)}, "the dataset's length was 40 and is 20"),
        ({"scheduler": None}, "lr_scheduler was there and is not there"),
        ({"model": functools.partial(models.Tagger, states_weight=True)}, "is of another model"),
    ],
    ids=["batch-size", "dataset", "scheduler", "model"],
)
def test_another_job_is_refused_and_told_what_differs(
    tmp_path: Path, change: dict[str, Any], told: str
) -> None:
    training = saving(ADAM, tmp_path)
    run(training, 1, 1)
    (error,) = jobs.run_workers(1, begin, replace(training, **change))
    assert told in error
    (error,) = jobs.run_workers(1, begin, replace(saving(ADAM, tmp_path, resume="never"), **change))
    assert error == ""


def test_a_bad_registration_is_refused() -> None:
    model = nn.Linear(2, 1)
    job = varuna.Varuna(model, torch.optim.SGD(model.parameters(), lr=0.1), [{"x": torch.ones(2)}], 1)
    with pytest.raises(ConfigError, match="the name must be a text"):
        job.register("", Counted())
    with pytest.raises(ConfigError, match=r"an? int has no state_dict\(\)"):
        job.register("number", 3)  # type: ignore[arg-type]
    job.register("counted", Counted())
    with pytest.raises(ConfigError, match="'counted' is registered already, as a Counted"):
        job.register("counted", Counted())


def test_state_that_only_pickle_could_hold_ends_the_job_and_names_the_path(tmp_path: Path) -> None:
    (error,) = jobs.run_workers(1, register_function, saving(ADAM, tmp_path))
    assert "registered hooks['f'] is a builtins.function" in error


def register_function(training: Training) -> str:
    job, _ = training.job()

    class Hooks(Counted):
        def state_dict(self) -> dict[str, Any]:
            return {"f": lambda: None}

    job.register("hooks", Hooks())
    try:
        list(job.train(1))
    except StateError as error:
        return str(error)
    return ""


# --- the command and its values --------------------------------------------------------------


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"every": "often"}, "Write 100 for steps, or 300s for seconds"),
        ({"every": "0"}, "give 1 or more"),
        ({"keep": "0"}, "Keep at least 1"),
        ({"resume": "oldest"}, "Write newest, never, or the step of a checkpoint"),
    ],
)
def test_values_that_cannot_be(arguments: dict[str, str], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        varuna.Checkpoints.parse("saved", **arguments)


@pytest.mark.parametrize("flag", [["--keep", "2"], ["--resume", "never"], ["--checkpoint-every", "5"]])
def test_a_flag_that_needs_a_place_says_so(flag: list[str]) -> None:
    done = CliRunner(env={"VARUNA_CHECKPOINT": ""}).invoke(cli.main, ["run", "-w", "1", *flag, __file__])
    assert done.exit_code == 2
    assert f"{' '.join(flag)} needs a place for checkpoints. Add --checkpoint URL." in done.output


@pytest.mark.parametrize("every", ["", "100", "300s", "0.5s"])
@pytest.mark.parametrize("resume", ["newest", "never", "1200"])
def test_values_survive_the_environment(every: str, resume: str) -> None:
    config = varuna.Checkpoints.parse("s3://bucket/x", every=every, keep="5", resume=resume)
    assert varuna.Checkpoints.from_env(config.to_env()) == config
