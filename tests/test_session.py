"""``varuna.Varuna`` end to end, over forked workers: training, evaluation, states, schedulers, spares."""

from __future__ import annotations

import functools
import json
import os
import random
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import default_collate

import varuna
from tests.cases import jobs, models, plain
from tests.cases.jobs import Training
from tests.exact import own_models

REPOSITORY = Path(__file__).parents[1]
BOUND = 1e-12


def slow_sgd(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


def eval_loss(training: Training, state: dict[str, torch.Tensor], dataset: models.Rows) -> float:
    """Mean over all samples at once, in eval mode, of the plain model."""
    model = training.make_model()
    model.load_state_dict(state, strict=True)
    with torch.no_grad():
        return model.eval()(**default_collate([dataset[index] for index in range(len(dataset))])).item()


# --- evaluation -----------------------------------------------------------------------------

NORMS = Training(model=models.Norms, dataset=models.points(), num_stages=2, num_steps=2, optimizer=slow_sgd)
HELD_OUT = models.points(13)


def evaluate_in_between(training: Training) -> list[list[float]]:
    """Before the first step and after each: with batches of 4 (a tail of 1) and of the default size."""
    job, _ = training.job()
    with job:
        losses = [[job.evaluate(HELD_OUT, batch_size=4), job.evaluate(HELD_OUT)]]
        for _ in job.train(training.num_steps):
            losses.append([job.evaluate(HELD_OUT, batch_size=4), job.evaluate(HELD_OUT)])  # noqa: PERF401
        return [losses, job.full_state_dict()]


@pytest.mark.parametrize("num_workers", [1, 4])
def test_evaluate_is_the_plain_eval_loss_and_changes_nothing(num_workers: int) -> None:
    training = replace(NORMS, num_stages=min(2, num_workers))
    results = jobs.run_workers(num_workers, evaluate_in_between, training)
    for num_steps in range(3):
        trained = plain.train(training, plain.mean_over_samples, micro_batch_size=2, num_steps=num_steps)
        expected = eval_loss(training, trained.state, HELD_OUT)
        for losses, _ in results:
            assert losses[num_steps] == pytest.approx([expected, expected], abs=BOUND)
    assert plain.difference(results[0][1], trained.state) < BOUND


# --- states ---------------------------------------------------------------------------------


def odd_parameters() -> nn.Module:
    """Ties under four names, frozen, unused and gradient-free parameters."""
    return own_models.Ties(varuna.CutPoint, vocab=models.VOCAB, width=models.WIDTH)


def two_groups(model: nn.Module) -> torch.optim.Optimizer:
    trainable = [parameter for parameter in model.parameters() if parameter.requires_grad]
    return torch.optim.AdamW(
        [
            {"params": [p for p in trainable if p.dim() > 1], "weight_decay": 0.1, "betas": (0.8, 0.9)},
            {"params": [p for p in trainable if p.dim() <= 1], "weight_decay": 0.3, "lr": 3e-3},
        ],
        lr=1e-2,
    )


def labelled_text() -> models.Rows:
    columns = models.text().columns
    return models.Rows({"tokens": columns["tokens"], "labels": columns["tokens"].flip(0)})


ODD = Training(model=odd_parameters, dataset=labelled_text(), num_stages=2, num_steps=3, optimizer=two_groups)


@pytest.mark.parametrize(
    ("num_stages", "num_workers"), [(2, 4), (4, 4), (2, 5)], ids=["2x2", "4x1", "one-spare"]
)
def test_odd_parameters_param_groups_and_spares(num_stages: int, num_workers: int) -> None:
    """With five workers the last has nothing to do, and reports the same numbers."""
    ours = jobs.train(replace(ODD, num_stages=num_stages), num_workers=num_workers)
    theirs = plain.train(ODD, plain.mean_over_samples)
    assert plain.difference(ours.state, theirs.state) < 1e-11
    assert ours.learning_rates == [[1e-2, 3e-3]] * 3
    plain.assert_equal(ours.loss, theirs.losses)
    start = ODD.make_model().state_dict()
    for name in ("unused", "threshold", "frozen.weight"):
        assert torch.equal(ours.state[name], start[name]), "no gradient, so no weight decay either"


def test_full_state_dict_loads_into_the_plain_model() -> None:
    ours = jobs.train(ODD, num_workers=2)
    model = ODD.make_model()
    assert list(ours.state) == list(model.state_dict())
    model.load_state_dict(ours.state, strict=True)
    assert all(torch.equal(value, ours.state[name]) for name, value in model.state_dict().items())
    assert model.head.weight is model.embed.weight


# --- training -------------------------------------------------------------------------------

DROPOUT = Training(
    model=functools.partial(models.Tagger, states_weight=True, dropout=0.3), dataset=models.text(), num_stages=2
)


def generator_states() -> list[Any]:
    return [torch.get_rng_state().tolist(), np.random.get_state()[1].tolist(), random.getstate()]


def train_in_pieces(training: Training) -> dict[str, Any]:
    """Nothing, two steps, one step of a loop that is left, two steps; generators watched."""
    job, _ = training.job()
    torch.manual_seed(5)
    np.random.seed(5)
    random.seed(5)
    before = generator_states()
    with job:
        indices = [step.index for step in job.train(0)]
        indices += [step.index for step in job.train(2)]
        for step in job.train(100):
            indices.append(step.index)
            break
        next_index = job.step_index
        job.evaluate(models.text(5), batch_size=2)
        indices += [step.index for step in job.train(2)]
        return {
            "indices": indices,
            "next_index": next_index,
            "undisturbed": generator_states() == before,
            "state": job.full_state_dict(),
        }


@pytest.mark.parametrize("num_workers", [1, 2])
def test_training_goes_on_and_leaves_the_users_generators_alone(num_workers: int) -> None:
    training = replace(DROPOUT, num_stages=num_workers)
    results = jobs.run_workers(num_workers, train_in_pieces, training)
    for result in results:
        assert result["indices"] == [0, 1, 2, 3, 4]
        assert result["next_index"] == 3
        assert result["undisturbed"]
    at_once = jobs.train(replace(training, num_steps=5), num_workers=num_workers)
    assert all(torch.equal(at_once.state[name], results[0]["state"][name]) for name in at_once.state)


def plateau(optimizer: torch.optim.Optimizer) -> torch.optim.lr_scheduler.ReduceLROnPlateau:
    """Lowers the rate whenever the loss did not fall by a tenth."""
    return torch.optim.lr_scheduler.ReduceLROnPlateau(optimizer, factor=0.5, patience=0, threshold=0.1)


def test_reduce_on_plateau_sees_the_global_loss() -> None:
    training = replace(DROPOUT, model=functools.partial(models.Tagger, states_weight=True), num_steps=6)
    training = replace(training, optimizer=slow_sgd, scheduler=plateau)
    ours = jobs.train(training, num_workers=4)
    model = training.make_model()
    optimizer = slow_sgd(model)
    scheduler = plateau(optimizer)
    rates = []
    for step_index in range(training.num_steps):
        rates.append(optimizer.param_groups[0]["lr"])
        ids = plain.ids_of(training, step_index)
        total, weight = plain.stated(model, default_collate([training.dataset[index] for index in ids]))
        (total / weight).backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step((total / weight).item())
    assert ours.lr == rates
    assert len(set(rates)) > 1
    assert plain.difference(ours.state, model.state_dict()) < BOUND


# --- start ----------------------------------------------------------------------------------

META = Training(
    model=models.Norms, dataset=models.points(), num_steps=2, optimizer=slow_sgd, options={"precision": "fp64"}
)


def train_from_meta(training: Training) -> Any:
    """The state at start and at the end."""
    with torch.device("meta"):
        job, _ = training.job()
    with job:
        start = job.full_state_dict()
        for _ in job.train(training.num_steps):
            pass
        return [start, job.full_state_dict()]


def test_models_on_the_meta_device_have_the_same_weights_for_every_layout() -> None:
    states = [
        jobs.run_workers(num_workers, train_from_meta, replace(META, num_stages=num_stages))[0]
        for num_stages, num_workers in ((1, 1), (2, 2), (2, 4))
    ]
    start, end = states[0]
    assert start["mix_1.weight"].std() > 0
    for other_start, other_end in states[1:]:
        assert all(torch.equal(other_start[name], start[name]) for name in start)
        assert plain.difference(other_end, end) < BOUND
    assert plain.difference(start, end) > 1e-3


SCRIPT = """
import json, torch, varuna
torch.manual_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
data = [(torch.randn(4), index % 3) for index in range(30)]
job = varuna.Varuna(
    model, torch.optim.SGD(model.parameters(), lr=0.1), data, batch_size=6,
    loss_fn=torch.nn.functional.cross_entropy, progress=False,
)
losses = [step.loss for step in job.train(num_steps=3)]
order = [varuna.sample_ids(step, 30, 6, 0) for step in range(3)]
torch.manual_seed(0)
plain = torch.nn.Sequential(torch.nn.Linear(4, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
expected = []
for ids in order:
    x, y = torch.utils.data.default_collate([data[index] for index in ids])
    loss = torch.nn.functional.cross_entropy(plain(x), y)
    optimizer.zero_grad(); loss.backward(); optimizer.step()
    expected.append(loss.item())
print(json.dumps([losses, expected]))
"""


def test_a_script_alone_needs_nothing_around_it(tmp_path: Path) -> None:
    """``python train.py``: no launcher, no variables, ends by itself with nothing on standard error."""
    (tmp_path / "train.py").write_text(SCRIPT)
    environment = {"PATH": os.environ["PATH"], "HOME": str(tmp_path), "PYTHONPATH": str(REPOSITORY)}
    environment["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        [sys.executable, "train.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert (done.returncode, done.stderr) == (0, "")
    losses, expected = json.loads(done.stdout)
    assert losses == pytest.approx(expected, rel=1e-5)


# --- names ----------------------------------------------------------------------------------


def test_every_exported_name_is_there() -> None:
    assert sorted(varuna.__all__, key=str) == varuna.__all__ == dir(varuna)
    for name in varuna.__all__:
        value = getattr(varuna, name)
        if isinstance(value, type) and issubclass(value, Exception):
            assert issubclass(value, varuna.VarunaError)
            assert value.__name__ == name
        if isinstance(value, type | Callable):
            assert value.__doc__, name
    with pytest.raises(AttributeError, match="no attribute 'Pipeline'"):
        _ = varuna.Pipeline


def test_importing_varuna_does_not_import_torch() -> None:
    code = "import sys, varuna; varuna.Layout, varuna.Plan, varuna.UserError; sys.exit('torch' in sys.modules)"
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True)
