"""G14, G15, G16: overflow, dropout and running statistics come out as in one plain process."""

from __future__ import annotations

import functools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tests.cases import jobs, models, plain
from tests.cases.jobs import Ran, Training


def overflowing() -> Training:
    """One sample of the second step, in the second pipeline's share, makes the first stage's gradients inf."""
    rows = models.points()
    columns = {name: column.float() for name, column in rows.columns.items()}
    columns["gain"] = torch.ones(len(rows))
    training = Training(
        model=models.Overflow,
        dataset=models.Rows(columns),
        num_stages=2,
        num_steps=4,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=0.1),
        scheduler=lambda optimizer: torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.5),
        options={"precision": "fp16"},
        observe=held_parameters,
    )
    used_later = {index for step in (0, 2, 3) for index in plain.ids_of(training, step)}
    culprit = next(i for i in plain.ids_of(training, 1)[8:] if i not in used_later)
    columns["gain"][culprit] = 1e8
    return training


def held_parameters(model: nn.Module) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in model.named_parameters() if not p.is_meta}


def test_g14_overflow_on_one_stage_makes_all_skip_together() -> None:
    training = overflowing()
    model = training.make_model()
    batch = torch.utils.data.default_collate([training.dataset[i] for i in plain.ids_of(training, 1)])
    with torch.autocast("cpu", torch.float16):
        loss = model(**batch)
    (loss * 2**12).backward()
    assert not torch.isfinite(model.first.weight.grad).all()
    assert torch.isfinite(model.third.weight.grad).all(), "it overflows on one stage only"

    ours = jobs.train(training, num_workers=4)
    assert ours.skipped == [False, True, False, False]
    scale = ours.loss_scale[0]
    assert scale > 1
    assert ours.loss_scale == [scale, scale, scale / 2, scale / 2]  # ``train`` compared it over all workers
    assert ours.lr == [0.1, 0.05, 0.05, 0.025], "a skipped step does not move the schedule"
    for after in ours.observed:
        assert all(torch.equal(after[1][name], after[0][name]) for name in after[0])
        assert not any(torch.equal(after[2][name], after[1][name]) for name in after[0])


DROPOUT = Training(
    model=functools.partial(models.Tagger, states_weight=True, dropout=0.3),
    dataset=models.text(),
    num_stages=2,
    num_steps=3,
)


def test_g15_dropout_with_recompute_equals_dropout_without() -> None:
    """Bit-equal, for all stages recomputing, none, and the first alone."""
    kept = jobs.train(DROPOUT, num_workers=2)
    for recompute in (True, (True, False)):
        ours = jobs.train(replace(DROPOUT, recompute=recompute), num_workers=2)
        assert ours.loss == kept.loss
        assert all(torch.equal(ours.state[name], kept.state[name]) for name in kept.state)
    without = plain.train(
        replace(DROPOUT, model=functools.partial(models.Tagger, states_weight=True)), plain.stated
    )
    assert abs(kept.loss[0] - without.losses[0]) > 1e-3, "dropout is on"
    assert plain.difference(kept.state, jobs.train(replace(DROPOUT, num_stages=1)).state) < 1e-12


NORMS = Training(model=models.Norms, dataset=models.points(), num_steps=2)


@functools.cache
def plain_norms() -> plain.Plain:
    """Micro-batch after micro-batch, as one process would."""
    return plain.train(NORMS, plain.mean_over_samples, micro_batch_size=NORMS.micro_batch_size)


@pytest.mark.parametrize(
    ("num_stages", "num_pipelines", "recompute"),
    [(2, 1, True), (2, 1, False), (1, 2, True), (2, 2, True), (1, 3, False)],
)
def test_g16_running_statistics_equal_a_plain_run(num_stages: int, num_pipelines: int, recompute: bool) -> None:
    """Eight micro-batches: over three pipelines 3, 3 and 2, of which the last has one sample."""
    training = replace(NORMS, num_stages=num_stages, recompute=recompute)
    ours: Ran = jobs.train(training, num_workers=num_stages * num_pipelines)
    assert plain.difference(ours.state, plain_norms().state) < 1e-12
    assert ours.state["norm_1.num_batches_tracked"].item() == 16
    assert not torch.equal(ours.state["norm_2.running_mean"], torch.zeros(models.WIDTH, dtype=torch.float64))
