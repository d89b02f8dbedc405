"""G1, G2, G3, G5: sums are divided once, by the global weight, whatever the micro-batches and the layout."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.cases import jobs, models, plain
from tests.cases.jobs import Ran, Training

BOUND = 1e-12


def num_valid(batch: dict[str, Tensor]) -> Tensor:
    return (batch["labels"] != -100).sum()


def uneven_text() -> models.Rows:
    """Between none and all labels valid; none at all in the second micro-batch of the first step."""
    rows = models.text()
    ids = plain.ids_of(Training(model=nn.Identity, dataset=rows), 0)
    rows.columns["labels"][ids[2:4]] = -100
    assert len({int((rows.columns["labels"][ids[k : k + 2]] != -100).sum()) for k in range(0, 15, 2)}) > 3
    return rows


STATED = Training(
    model=functools.partial(models.Tagger, states_weight=True), dataset=uneven_text(), num_steps=2
)
GIVEN = replace(
    STATED,
    model=functools.partial(models.Tagger, states_weight=False),
    options={"loss_weight": num_valid},
)


@functools.cache
def ran(form: str, num_stages: int, num_pipelines: int, micro_batch_size: int = 2) -> Ran:
    training = replace(
        {"stated": STATED, "given": GIVEN}[form], num_stages=num_stages, micro_batch_size=micro_batch_size
    )
    return jobs.train(training, num_workers=num_stages * num_pipelines)


@functools.cache
def full_batch() -> plain.Plain:
    """One forward of the whole global batch: the mean over all its valid tokens."""
    return plain.train(STATED, plain.stated)


@pytest.mark.parametrize(
    ("form", "num_stages", "num_pipelines"),
    [("stated", 2, 2), ("stated", 1, 1), ("given", 1, 1), ("given", 2, 1), ("given", 1, 2)],
)
def test_g1_unequal_numbers_of_valid_tokens(form: str, num_stages: int, num_pipelines: int) -> None:
    """With ``loss_weight`` the mean of the micro-batch without a valid token is nan, which must not count."""
    ours, theirs = ran(form, num_stages, num_pipelines), full_batch()
    assert plain.difference(ours.state, theirs.state) < BOUND
    plain.assert_equal(ours.loss, theirs.losses)
    plain.assert_equal(ours.grad_norm, theirs.grad_norms)
    assert ours.weight == theirs.weights


def test_g1_no_valid_token_in_the_whole_batch() -> None:
    """Nothing to learn from: no update, no nan, and the next batch is used."""
    rows = uneven_text()
    training = replace(GIVEN, dataset=rows, num_stages=2, optimizer=lambda m: torch.optim.AdamW(m.parameters()))
    first_ids = plain.ids_of(training, 0)
    rows.columns["labels"][first_ids] = -100
    ours = jobs.train(training, num_workers=2)
    assert ours.skipped == [True, False]
    assert (ours.loss[0], ours.weight[0]) == (0.0, 0.0)
    assert ours.loss[1] > 0
    assert all(bool(torch.isfinite(value).all()) for value in ours.state.values())


def test_g2_the_scaling_is_in_the_gradient_for_any_number_of_stages() -> None:
    one_step = {P: jobs.train(replace(GIVEN, num_steps=1, num_stages=P), num_workers=P) for P in (1, 2)}
    gradients = {P: plain.gradients(GIVEN, ours.state) for P, ours in one_step.items()}
    assert plain.difference(gradients[2], gradients[1]) < BOUND
    model = GIVEN.make_model()
    ids = plain.ids_of(GIVEN, 0)
    batch = torch.utils.data.default_collate([GIVEN.dataset[index] for index in ids])
    model(**batch).backward()
    expected = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert plain.difference(gradients[2], expected) < BOUND


def test_g3_accumulating_equals_one_big_step() -> None:
    """Eight micro-batches of two, three of five, one of fifteen."""
    big = ran("given", 1, 1, 15)
    for micro_batch_size in (2, 5):
        ours = ran("given", 1, 1, micro_batch_size)
        assert plain.difference(ours.state, big.state) < BOUND
        plain.assert_equal(ours.grad_norm, big.grad_norm)
    assert plain.difference(ran("given", 2, 1).state, big.state) < BOUND


def test_g5_a_custom_loss_states_its_own_weight() -> None:
    training = Training(model=models.OwnLoss, dataset=models.weighted_classes(), num_stages=2)
    ours = jobs.train(training, num_workers=4)
    columns = {name: column[plain.ids_of(training, 0)] for name, column in training.dataset.columns.items()}
    model = training.make_model()
    x, y, importance = columns["x"], columns["y"], columns["importance"]
    h = x
    for layer in model.student:
        h = torch.tanh(layer(h))
    smooth = F.cross_entropy(h, y, label_smoothing=0.1, reduction="none")
    known = F.softmax(model.teacher(x), -1)
    distilled = F.kl_div(F.log_softmax(h, -1), known, reduction="none").sum(-1)
    loss = torch.sum((smooth + 0.5 * distilled) * importance) / importance.sum()
    loss.backward()
    plain.assert_equal(ours.weight, [importance.sum().item()])
    plain.assert_equal(ours.loss, [loss.item()])
    gradients = plain.gradients(training, ours.state)
    for name, parameter in model.named_parameters():
        expected = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
        assert (gradients[name] - expected).abs().max() < BOUND, name
