"""G7, G8, G10, G18: one norm over all stages, ties count once and stay equal, one reduction a step."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.cases import jobs, models, plain
from tests.cases.jobs import Training
from varuna.run.group import Group
from varuna.run.pending import Pending

BOUND = 1e-12
TIED = Training(
    model=functools.partial(models.Tagger, states_weight=True, tied=True),
    dataset=models.text(),
    num_stages=2,
    num_steps=2,
    options={"clip_grad_norm": 0.05},
)


@functools.cache
def clipped() -> tuple[jobs.Ran, plain.Plain]:
    return jobs.train(TIED, num_workers=2), plain.train(TIED, plain.stated)


def test_g7_clipping_sees_the_norm_over_all_stages() -> None:
    ours, theirs = clipped()
    assert min(ours.grad_norm) > 0.05
    plain.assert_equal(ours.grad_norm, theirs.grad_norms)
    assert plain.difference(ours.state, theirs.state) < BOUND
    one_step = jobs.train(replace(TIED, num_steps=1), num_workers=2)
    clipped_gradients = plain.gradients(TIED, one_step.state)
    whole = plain.gradients(TIED, plain.train(replace(TIED, num_steps=1, options={}), plain.stated).state)
    factors = [clipped_gradients[name].norm() / whole[name].norm() for name in whole]
    assert max(factors) - min(factors) < BOUND, "the same factor on every stage"
    assert 0 < max(factors) < 1


def test_g8_a_tied_weight_counts_once_in_the_norm() -> None:
    ours, _ = clipped()
    model = TIED.make_model()
    batch = torch.utils.data.default_collate([TIED.dataset[index] for index in plain.ids_of(TIED, 0)])
    total, weight = plain.stated(model, batch)
    (total / weight).backward()
    squares = {name: parameter.grad.pow(2).sum().item() for name, parameter in model.named_parameters()}
    assert "head.weight" not in squares
    assert abs(ours.grad_norm[0] - sum(squares.values()) ** 0.5) < BOUND
    twice = (sum(squares.values()) + squares["embed.weight"]) ** 0.5
    assert abs(ours.grad_norm[0] - twice) > 1e-3, "the tie would be seen if it counted twice"


# --- G10 ------------------------------------------------------------------------------------

NEST = Training(
    model=models.Nest,
    dataset=models.points(),
    num_steps=4,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
)


def held_ties(model: nn.Module) -> dict[str, Tensor]:
    parameters = dict(model.named_parameters())
    return {
        name: parameters[name].detach().clone() for name in models.Nest.TIED if not parameters[name].is_meta
    }


@pytest.mark.parametrize(
    ("num_stages", "holders"),
    [
        (4, {"outer_1.weight": [0, 3], "inner_1.weight": [1, 2], "wide_1.weight": [0, 1, 3]}),
        (2, {name: [0, 1, 2, 3] for name in models.Nest.TIED}),
    ],
    ids=["4x1", "2x2"],
)
def test_g10_tied_copies_are_bit_equal_after_every_step(num_stages: int, holders: dict[str, list[int]]) -> None:
    """Three ties over nested and overlapping ranges of stages."""
    training = replace(NEST, num_stages=num_stages, observe=held_ties)
    ours = jobs.train(training, num_workers=4)
    for name, ranks in holders.items():
        assert [rank for rank in range(4) if name in ours.observed[rank][0]] == ranks
        before = NEST.make_model().state_dict()[name]
        for step_index in range(training.num_steps):
            copies = [ours.observed[rank][step_index][name] for rank in ranks]
            assert all(torch.equal(copy, copies[0]) for copy in copies), (name, step_index)
            assert not torch.equal(copies[0], before)
            before = copies[0]
    theirs = plain.train(NEST, plain.mean_over_samples)
    assert plain.difference(ours.state, theirs.state) < 1e-11
    plain.assert_equal(ours.grad_norm, theirs.grad_norms)


# --- G18 ------------------------------------------------------------------------------------

REPLICAS = Training(
    model=functools.partial(models.Tagger, states_weight=True),
    dataset=models.text(),
    num_stages=2,
    num_steps=3,
    optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=1e-2),
)


def count_reductions(training: Training) -> dict[str, Any]:
    """Trains; gives the size of every all-reduce of each step, and what this worker holds at the end."""
    sizes: list[tuple[list[int], int]] = []
    original = Group.start_all_reduce_sum

    def counted(group: Group, tensor: Tensor) -> Pending:
        sizes.append((list(group.ranks), tensor.numel()))
        return original(group, tensor)

    Group.start_all_reduce_sum = counted  # this process does nothing else
    job, model = training.job()
    per_step = []
    for _ in job.train(training.num_steps):
        per_step.append(list(sizes))
        sizes.clear()
    held = {name: p.detach() for name, p in model.named_parameters() if not p.is_meta}
    job.close()
    return {"per_step": per_step, "held": held}


@pytest.mark.parametrize("micro_batch_size", [2, 7])
def test_g18_one_reduction_a_step_and_bit_equal_replicas(micro_batch_size: int) -> None:
    """Eight or three micro-batches: every gradient element (and a flag per parameter) travels once."""
    results = jobs.run_workers(4, count_reductions, replace(REPLICAS, micro_batch_size=micro_batch_size))
    for rank, result in enumerate(results):
        replicas = [rank % 2, rank % 2 + 2]
        once = sum(value.numel() + 1 for value in result["held"].values())
        for step in result["per_step"][1:]:
            *gradients, (everyone, _) = step
            assert everyone == [0, 1, 2, 3], "the commit comes last, and is the only one over all"
            assert all(ranks == replicas for ranks, _ in gradients)
            assert sum(size for _, size in gradients) == once
    for one, other in ((0, 2), (1, 3)):
        mine, theirs = results[one]["held"], results[other]["held"]
        assert mine.keys() == theirs.keys()
        assert all(torch.equal(mine[name], theirs[name]) for name in mine)
    assert results[0]["held"].keys().isdisjoint(results[1]["held"])
