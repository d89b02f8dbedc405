"""Buffers that forward changes: the plain run's values for any number of pipelines and uneven shares."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from tests.run.processes import Context, run_workers
from varuna.errors import PlanError
from varuna.partition.section import BufferRule
from varuna.run.buffers import BufferSync

NUM_MICRO_BATCHES = 7
NAMES = ("norm.running_mean", "norm.running_var", "norm.num_batches_tracked", "seen")


class Counting(nn.Module):
    """BatchNorm and a buffer without a rule of its own."""

    def __init__(self, momentum: float) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(4, momentum=momentum)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen.copy_(x.mean())
        return self.norm(x)


def build(momentum: float, dtype: torch.dtype) -> Counting:
    torch.manual_seed(0)
    model = Counting(momentum).to(dtype)
    model.norm.running_mean.normal_()
    model.norm.num_batches_tracked += 3
    return model


def micro_batch(step: int, k: int, dtype: torch.dtype) -> torch.Tensor:
    generator = torch.Generator().manual_seed(100 * step + k)
    return torch.randn(5 + k % 2, 4, generator=generator, dtype=torch.float64).to(dtype) * (k + 1)


def values(model: nn.Module) -> dict[str, Any]:
    return {name: model.get_buffer(name).double().flatten().tolist() for name in NAMES}


def shared(context: Context, shares: list[list[int]], momentum: float, dtype_name: str) -> list[dict[str, Any]]:
    dtype = getattr(torch, dtype_name)
    model = build(momentum, dtype)
    groups = context.groups()
    affine = BufferRule(kind="affine", decay=1 - momentum)
    rules = {
        "norm.running_mean": affine,
        "norm.running_var": affine,
        "norm.num_batches_tracked": BufferRule(kind="affine", decay=1.0),
        "seen": BufferRule(kind="mean"),
    }
    share = range(*shares[context.rank])
    sync = BufferSync(
        {name: model.get_buffer(name) for name in NAMES},
        rules,
        dict.fromkeys(NAMES, tuple(range(context.world.size))),
        groups,
        micro_batches=share,
        num_micro_batches=NUM_MICRO_BATCHES,
    )
    sync.prepare()
    found = []
    for step in range(2):
        before = values(model)
        sync.begin()
        for k in share:
            model(micro_batch(step, k, dtype))
        changed = values(model)
        sync.restore()
        assert values(model) == before != changed
        for k in share:
            model(micro_batch(step, k, dtype))
        assert values(model) == changed
        sync.combine()
        found.append(values(model))
    groups.close()
    return found


@pytest.mark.parametrize("shares", [[[0, 7]], [[0, 4], [4, 7]], [[0, 1], [1, 5], [5, 7]]])
@pytest.mark.parametrize(("dtype", "bound"), [("float64", 1e-12), ("float32", 1e-5)])
def test_g16_running_statistics_equal_the_plain_run(shares: list[list[int]], dtype: str, bound: float) -> None:
    momentum = 0.3
    plain = build(momentum, getattr(torch, dtype))
    results = run_workers(len(shares), shared, shares, momentum, dtype)
    for step in range(2):
        means = []
        for k in range(NUM_MICRO_BATCHES):
            plain(micro_batch(step, k, getattr(torch, dtype)))
            means.append(plain.seen.item())
        expected = values(plain)
        ends = [means[end - 1] for _, end in shares]
        expected["seen"] = [
            sum(m * (e - s) for m, (s, e) in zip(ends, shares, strict=True)) / NUM_MICRO_BATCHES
        ]
        for result in results:
            assert result[step] == results[0][step], "copies differ"
            for name in NAMES:
                assert result[step][name] == pytest.approx(expected[name], rel=bound)
        assert results[0][step]["norm.num_batches_tracked"] == [3 + 7 * (step + 1)]


def test_with_one_holder_nothing_is_touched() -> None:
    result = run_workers(1, shared, [[0, 7]], 0.1, "float32")
    plain = build(0.1, torch.float32)
    for step in range(2):
        for k in range(NUM_MICRO_BATCHES):
            plain(micro_batch(step, k, torch.float32))
        assert result[0][step] == values(plain)


def overlapping(context: Context) -> None:
    model = build(0.1, torch.float64)
    name = "norm.running_mean"
    rules = {name: BufferRule(kind="affine", decay=0.9)}
    buffers = {name: model.get_buffer(name)}
    groups = context.groups()
    sync = BufferSync(buffers, rules, {name: (0, 1)}, groups, micro_batches=range(7), num_micro_batches=7)
    sync.begin()
    with pytest.raises(PlanError, match=r"Several stages.*norm\.running_mean"):
        sync.combine()
    groups.close()


def test_a_buffer_that_two_stages_of_a_pipeline_change_is_refused() -> None:
    run_workers(2, overlapping)
