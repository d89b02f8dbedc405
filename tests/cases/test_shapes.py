"""S19, S21, S22, S26, S27: changing shapes, batches that do not divide, tensors of every kind across cuts."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from tests.cases import jobs, models, plain
from tests.cases.jobs import Training
from tests.run.processes import WorkersFailed

BOUND = 1e-12
LENGTHS = (3, 4, 6)


class Sentences(models.Rows):
    """Text of which sample i has the i-th of a row of lengths."""

    def __init__(self, lengths: Sequence[int]) -> None:
        super().__init__(models.text(len(lengths)).columns)
        self.lengths = lengths

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[: self.lengths[index]] for name, column in super().__getitem__(index).items()}


def pad(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
    """To the longest of the micro-batch."""
    longest = max(len(sample["tokens"]) for sample in samples)
    values = {"tokens": 0, "labels": -100}
    return {
        name: torch.stack(
            [F.pad(sample[name], (0, longest - len(sample[name])), value=value) for sample in samples]
        )
        for name, value in values.items()
    }


def sentences(long_step: int) -> Training:
    """Lengths change from micro-batch to micro-batch; in one step all are long."""
    lengths = [LENGTHS[index % 3] for index in range(40)]
    training = Training(
        model=functools.partial(models.Tagger, states_weight=True),
        dataset=Sentences(lengths),
        num_stages=3,
        num_steps=2,
        options={"collate_fn": pad},
    )
    for index in plain.ids_of(training, long_step):
        lengths[index] = max(LENGTHS)
    return training


@pytest.mark.parametrize(("num_stages", "num_pipelines"), [(2, 1), (3, 1), (1, 2)])
def test_s19_sequence_length_changes_between_micro_batches_and_steps(
    num_stages: int, num_pipelines: int
) -> None:
    """The middle one of three stages reads no data: it learns the length from the message."""
    training = replace(sentences(long_step=1), num_stages=num_stages)
    ids = plain.ids_of(training, 0)
    seen = {max(training.dataset.lengths[i] for i in ids[k : k + 2]) for k in range(0, 15, 2)}
    assert len(seen) > 1
    ours = jobs.train(training, num_workers=num_stages * num_pipelines)
    theirs = plain.train(training, plain.stated)
    assert plain.difference(ours.state, theirs.state) < BOUND
    plain.assert_equal(ours.loss, theirs.losses)


def test_s19_a_batch_of_another_kind_is_the_same_clear_error_on_all_workers() -> None:
    """Not a shape but a dtype changes, in the third micro-batch, read by the first stage of three."""
    training = replace(sentences(long_step=0), num_steps=1)
    culprit = plain.ids_of(training, 0)[4]

    class Odd(Sentences):
        def __getitem__(self, index: int) -> dict[str, Tensor]:
            sample = super().__getitem__(index)
            return {name: column.int() for name, column in sample.items()} if index == culprit else sample

    def collate(samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = pad(samples)
        odd = any(sample["tokens"].dtype == torch.int32 for sample in samples)
        return {name: column.int() for name, column in batch.items()} if odd else batch

    training = replace(training, dataset=Odd(training.dataset.lengths), options={"collate_fn": collate})
    with pytest.raises(WorkersFailed) as raised:
        jobs.train(training, num_workers=3)
    assert sorted(raised.value.errors) == [0, 1, 2]
    for text in raised.value.errors.values():
        assert "int32" in text
        assert "micro-batch 2" in text


# --- batches that do not divide -------------------------------------------------------------

TEXT = Training(model=functools.partial(models.Tagger, states_weight=True), dataset=models.text(), num_steps=2)


@pytest.mark.parametrize(
    ("batch_size", "micro_batch_size", "num_stages", "num_pipelines"),
    [(7, 2, 1, 2), (7, 3, 1, 3), (5, 2, 2, 2), (1, 1, 2, 1)],
)
def test_s21_any_global_batch(
    batch_size: int, micro_batch_size: int, num_stages: int, num_pipelines: int
) -> None:
    """Neither a multiple of the micro-batch nor of the number of pipelines."""
    training = replace(
        TEXT, batch_size=batch_size, micro_batch_size=micro_batch_size, num_stages=num_stages,
        model=models.Kinds, dataset=models.points(),
    )  # fmt: skip
    ours = jobs.train(training, num_workers=num_stages * num_pipelines)
    theirs = plain.train(training, plain.mean_over_samples)
    assert plain.difference(ours.state, theirs.state) < BOUND
    assert ours.num_samples == [batch_size] * 2
    plain.assert_equal(ours.loss, theirs.losses)


def train_and_evaluate(training: Training, datasets: Sequence[Any]) -> dict[str, Any]:
    """Trains through the end of the data, then evaluates with batches of two."""
    job, _ = training.job()
    with job:
        losses = [step.loss for step in job.train(training.num_steps)]
        return {"losses": losses, "evaluated": [job.evaluate(dataset, batch_size=2) for dataset in datasets]}


def test_s22_the_end_of_the_data_is_no_hang() -> None:
    """Ten samples in batches of four, over two pipelines; evaluations of 5 samples and of 1 end ragged."""
    training = replace(
        TEXT, model=models.Kinds, dataset=models.points(10), batch_size=4, num_steps=6, num_stages=2,
        optimizer=lambda model: torch.optim.SGD(model.parameters(), lr=1e-2),
    )  # fmt: skip
    used = [index for step in range(5) for index in plain.ids_of(training, step)]
    assert sorted(used[:10]) == sorted(used[10:]) == list(range(10)), "the third batch spans two epochs"
    tails = [models.points(5), models.points(1)]
    results = jobs.run_workers(4, train_and_evaluate, training, tails)
    theirs = plain.train(training, plain.mean_over_samples)
    model = training.make_model()
    model.load_state_dict(theirs.state)
    means = [
        model(**torch.utils.data.default_collate([rows[i] for i in range(len(rows))])).item() for rows in tails
    ]
    for result in results:
        plain.assert_equal(result["losses"], theirs.losses)
        plain.assert_equal(result["evaluated"], means)


# --- what crosses a cut ---------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True])
def test_s26_integer_boolean_and_non_differentiable_tensors_cross_cuts(recompute: bool) -> None:
    """Four stages; each kind jumps over at least one of them."""
    training = Training(
        model=models.Kinds, dataset=models.points(), num_stages=4, num_steps=2, recompute=recompute
    )
    crossing = jobs.run_workers(4, kinds_across_cuts, training)[0]
    assert {"float64 True", "float64 False", "int64 False", "bool False"} <= set(crossing)
    ours = jobs.train(training, num_workers=4)
    theirs = plain.train(training, plain.mean_over_samples)
    assert plain.difference(ours.state, theirs.state) < BOUND


def kinds_across_cuts(training: Training) -> list[str]:
    """dtype and differentiable of whatever crosses a cut."""
    job, _ = training.job()
    with job:
        assert len(job.sections) == 4
        sections = job._member.generation.partitions.reference.sections
        return [
            f"{str(value.dtype).removeprefix('torch.')} {value.differentiable}"
            for section in sections[:-1]
            for value in section.sent
        ]


@pytest.mark.parametrize("recompute", [False, True])
def test_s27_an_input_without_gradient_is_fine(recompute: bool) -> None:
    """Frozen first stage; a branch that is only compared; a micro-batch in which nothing counts."""
    columns = dict(models.points().columns)
    columns["valid"] = torch.ones(40, dtype=torch.float64)
    training = Training(
        model=models.NoGradient, dataset=models.Rows(columns), num_stages=4, num_steps=2, recompute=recompute
    )
    columns_used = training.dataset.columns["valid"]
    columns_used[plain.ids_of(training, 0)[2:4]] = 0
    ours = jobs.train(training, num_workers=4)
    theirs = plain.train(training, plain.stated)
    assert plain.difference(ours.state, theirs.state) < BOUND
    assert ours.weight == [13.0, 15.0 - (columns_used[plain.ids_of(training, 1)] == 0).sum().item()]
    start = training.make_model().state_dict()
    for name in ("layers.0.weight", "side.weight"):
        assert torch.equal(ours.state[name], start[name])
