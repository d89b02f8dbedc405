"""Sections compute what the model computes: every cut, every grouping, everything that can cross."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.partition.split_support import (
    GPT,
    assert_same_step,
    graph_of,
    language_batch,
    open_positions,
    run_staged,
)
from varuna.errors import CutPointError
from varuna.partition import CutPoint, partition
from varuna.partition.split import split


@pytest.fixture(autouse=True)
def _double() -> Any:
    torch.manual_seed(0)
    torch.set_default_dtype(torch.float64)
    yield
    torch.set_default_dtype(torch.float32)


def test_every_single_cut_of_a_gpt() -> None:
    model = GPT(layers=2, dropout=0.3)
    _, flow = graph_of(model, language_batch(4))
    positions = open_positions(flow)
    assert len(positions) > 30
    for position in positions:
        assert_same_step(model, split(model, flow, [position]), language_batch(3))


@pytest.mark.parametrize("num_samples", [3, 1, 4])
def test_all_cuts_at_once(num_samples: int) -> None:
    model = GPT(layers=2, dropout=0.3)
    _, flow = graph_of(model, language_batch(4))
    divided = split(model, flow, open_positions(flow))
    for section, following in zip(divided.sections, divided.sections[1:], strict=False):
        assert section.sent == following.received
    assert divided.sections[0].received == ()
    assert_same_step(model, divided, language_batch(num_samples))


@pytest.mark.parametrize("groups", [[(0, 4)], [(0, 1), (1, 4)], [(0, 2), (2, 3), (3, 4)]])
def test_any_run_of_sections_is_a_stage(groups: list[tuple[int, int]]) -> None:
    model = GPT(layers=3, marks=True, dropout=0.3)
    divided = partition(model, language_batch(2))
    assert [section.spec.name for section in divided.sections] == ["tokens", "blocks.1", "blocks.2", "norm"]
    assert_same_step(model, divided, language_batch(3), groups=groups)


def test_tied_weight_is_one_object_in_both_sections() -> None:
    model = GPT(marks=True)
    divided = partition(model, language_batch(2))
    first, last = divided.sections[0], divided.sections[-1]
    assert first.parameters["tokens.weight"] is last.parameters["tokens.weight"] is model.tokens.weight
    assert "head.weight" not in last.parameters


def test_sections_need_only_their_inputs() -> None:
    divided = partition(GPT(marks=True), language_batch(2))
    assert [section.input_keys for section in divided.sections] == [("ids",), (), (), ("labels",)]


def test_parameters_swapped_in_place_are_seen() -> None:
    model = GPT(marks=True)
    divided = partition(model, language_batch(2))
    batch = language_batch(2)
    before = run_staged(divided, batch, [(0, 4)])
    model.zero_grad(set_to_none=True)
    torch.utils.swap_tensors(model.norm.weight, nn.Parameter(model.norm.weight.detach() * 3))
    assert run_staged(divided, batch, [(0, 4)]) != before
    assert_same_step(model, divided, batch)


class Skips(nn.Module):
    """Skip connections, integers, booleans, a 0-dimensional value, a mask, None and a number over several
    cuts.
    """

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(20, 8)
        self.steps = nn.ModuleList(nn.Linear(8, 8) for _ in range(4))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(4))
        self.side = nn.Embedding(8, 8)

    def forward(
        self,
        ids: Tensor,
        *,
        labels: Tensor,
        mask: Tensor | None = None,
        extra: Tensor | None = None,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        bias = torch.zeros(ids.shape, dtype=torch.float64)
        if mask is not None:
            bias = bias.masked_fill(~mask, -1.0)
        h = self.embed(ids) * scale
        first, choice, positive, mean = h, h.argmax(-1), h > 0, h.mean()
        for step, cut in zip(self.steps, self.cuts, strict=True):
            h = cut(torch.tanh(step(h)) + first * bias.unsqueeze(-1)) + mean
        if extra is not None:
            h = h + extra
        h = torch.where(positive, h, 0.5 * h) + self.side(choice)
        return {"loss": F.cross_entropy(h.flatten(0, 1), labels.flatten() % 8)}


def _skips_batch(num_samples: int) -> dict[str, Any]:
    batch: dict[str, Any] = language_batch(num_samples)
    mask = torch.arange(8) < torch.randint(3, 8, (num_samples, 1))
    return {**batch, "mask": mask, "extra": None, "scale": 0.5}


@pytest.mark.parametrize("num_samples", [3, 1, 4])
def test_everything_alive_crosses(num_samples: int) -> None:
    model = Skips()
    divided = partition(model, _skips_batch(2))
    middle = divided.sections[2]
    kinds = {(spec.dtype, len(spec.shape), spec.differentiable) for spec in middle.received}
    assert (torch.int64, 2, False) in kinds
    assert (torch.bool, 3, False) in kinds
    assert (torch.float64, 0, True) in kinds
    assert middle.received == middle.sent[:-1] + middle.received[-1:]  # all but the main tensor are relayed
    assert_same_step(model, divided, _skips_batch(num_samples))


def test_masks_are_computed_again_rather_than_sent() -> None:
    divided = partition(Skips(), _skips_batch(2))
    assert all("mask" in section.input_keys for section in divided.sections[:4])
    assert all("masked_fill" not in spec.name for section in divided.sections for spec in section.sent)


class WrittenMask(nn.Module):
    """A mask made with in-place operators on memory of its own; batch size read from an intermediate value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.cut = nn.Linear(4, 4), nn.Linear(4, 4), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        mask = torch.zeros(x.shape[0], 4)
        mask[:, 1:] = 1
        mask.mul_(2)
        h = self.cut(self.a(x) * mask)
        again = torch.ones(h.shape[0], 4)
        return (self.b(h) * mask * again).square().mean()


@pytest.mark.parametrize("num_samples", [3, 1])
def test_written_masks_and_sizes_do_not_cross(num_samples: int) -> None:
    model = WrittenMask()
    divided = partition(model, {"x": torch.randn(2, 4)})
    assert len(divided.sections[0].sent) == 1
    assert divided.sections[1].input_keys == ()
    assert_same_step(model, divided, {"x": torch.randn(num_samples, 4)})


class InPlace(nn.Module):
    """Changes what crossed a cut in place right after it, and another value's memory two cuts later."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.cut, self.second = nn.Linear(4, 4), nn.Linear(4, 4), CutPoint(), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        side = self.a(x) * 2.0
        h = self.cut(self.a(x) * 1.0)
        F.relu(h, inplace=True)
        y = self.second(self.b(h))
        side[:, 0].mul_(3.0)
        return (y + side + h).square().mean()


def test_in_place_after_a_cut_leaves_what_was_received_alone() -> None:
    model = InPlace()
    divided = partition(model, {"x": torch.randn(2, 4)})
    assert len(divided.sections) == 3
    batch = {"x": torch.randn(3, 4)}
    assert_same_step(model, divided, batch)
    values: tuple[Tensor, ...] = ()
    for section in divided.sections:
        copies = [value.clone() for value in values]
        sent = section.run(batch, values)
        torch.testing.assert_close(list(values), copies, rtol=0, atol=0)
        values = sent


class TwoNames(nn.Module):
    """Two live names of the same memory, changed later: no copy can keep them together."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.cut = nn.Linear(4, 4), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        h = self.a(x) * 1.0
        part = h[:, :2]
        h = self.cut(h)
        part.mul_(2.0)
        return (h.sum(1) + part.sum(1)).square().mean()


def test_two_names_of_changing_memory_refuse_a_cut() -> None:
    with pytest.raises(CutPointError, match="share"):
        partition(TwoNames(), {"x": torch.randn(2, 4)})


class Normed(nn.Module):
    """BatchNorm, a counter and a running average of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm = nn.Conv1d(2, 4, 3, padding=1), nn.BatchNorm1d(4, momentum=0.3)
        self.relu, self.cut, self.out = nn.ReLU(inplace=True), CutPoint(), nn.Linear(4, 1)
        self.register_buffer("average", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        h = self.cut(self.relu(self.norm(self.conv(x)))).mean(-1)
        self.count += 1
        with torch.no_grad():
            self.average.mul_(0.9).add_(0.1 * h.mean(0))
        return self.out(h * (1.0 + self.average)).square().mean()


@pytest.mark.parametrize("num_samples", [3, 1, 4])
def test_buffers_follow_the_plain_step(num_samples: int) -> None:
    model = Normed()
    divided = partition(model, {"x": torch.randn(2, 2, 5)})
    assert_same_step(model, divided, {"x": torch.randn(num_samples, 2, 5)})
    first, last = (section.mutated_buffers for section in divided.sections)
    assert {name: (rule.kind, round(rule.decay, 9)) for name, rule in first.items()} == {
        "norm.running_mean": ("affine", 0.7),
        "norm.running_var": ("affine", 0.7),
        "norm.num_batches_tracked": ("affine", 1.0),
    }
    assert (last["count"].kind, last["count"].decay, last["average"].kind) == ("affine", 1.0, "mean")


def test_statistics_of_a_layer_used_twice_decay_twice() -> None:
    class Shared(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.norm, self.cut, self.out = nn.BatchNorm1d(4, momentum=0.3), CutPoint(), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.out(self.cut(self.norm(self.norm(x).square()))).square().mean()

    divided = partition(Shared(), {"x": torch.randn(4, 4)})
    rules = divided.sections[0].mutated_buffers
    assert {name: (rule.kind, round(rule.decay, 9)) for name, rule in rules.items()} == {
        "norm.running_mean": ("affine", 0.49),
        "norm.running_var": ("affine", 0.49),
        "norm.num_batches_tracked": ("affine", 1.0),
    }


def test_preserved_buffers_stay_and_outputs_are_equal() -> None:
    model = Normed()
    divided = partition(model, {"x": torch.randn(2, 2, 5)})
    batch = {"x": torch.randn(3, 2, 5)}
    state = {name: value.clone() for name, value in model.named_buffers()}
    values: tuple[Tensor, ...] = ()
    for section in divided.sections:
        with section.preserve_buffers():
            values = section.run(batch, values)
    for name, value in model.named_buffers():
        assert torch.equal(value, state[name]), name
    again: tuple[Tensor, ...] = ()
    for section in divided.sections:
        again = section.run(batch, again)
    assert torch.equal(again[0], values[0])
    assert model.count == 1


def test_micro_batches_in_flight_before_their_backwards() -> None:
    """The running average is read by later forwards before earlier backwards; autograd must not see it
    change.
    """
    model = Normed()
    divided = partition(model, {"x": torch.randn(2, 2, 5)})
    losses = []
    for _ in range(3):
        values: tuple[Tensor, ...] = ()
        for section in divided.sections:
            values = section.run({"x": torch.randn(3, 2, 5)}, values)
        losses.append(values[0])
    for loss in losses:
        loss.backward()


class Frozen(nn.Module):
    """Nothing before the second cut needs a gradient; a detached value crosses too."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 4)
        self.a.requires_grad_(False)
        self.cuts = nn.ModuleList([CutPoint(), CutPoint()])

    def forward(self, x: Tensor) -> Tensor:
        h = self.cuts[0](torch.tanh(self.a(x)))
        y = torch.tanh(self.b(h))
        target = y.detach()
        with torch.no_grad():
            second = self.b(y)
        y = self.cuts[1](y)
        return (self.c(y) - target + second).square().mean()


def test_differentiable_only_where_a_gradient_can_come() -> None:
    model = Frozen()
    divided = partition(model, {"x": torch.randn(2, 4)})
    assert [spec.differentiable for spec in divided.sections[0].sent] == [False]
    assert sorted(spec.differentiable for spec in divided.sections[1].sent) == [False, False, True]
    assert_same_step(model, divided, {"x": torch.randn(3, 4)})


def test_random_sections_are_known() -> None:
    divided = partition(GPT(marks=True, dropout=0.1), language_batch(2))
    assert [section.uses_random for section in divided.sections] == [True, True, True, False]
    evaluated = partition(GPT(marks=True, dropout=0.1), language_batch(2), training=False)
    assert not any(section.uses_random for section in evaluated.sections)


def test_digest_is_of_the_graph_the_cuts_and_the_names() -> None:
    digests = []
    for seed, layers, marks in [(0, 3, True), (1, 3, True), (0, 2, True), (0, 3, False)]:
        torch.manual_seed(seed)
        digests.append(partition(GPT(layers=layers, marks=marks), language_batch(2)).digest)
    assert digests[0] == digests[1]
    assert len(set(digests)) == 3


def test_numbers_of_a_section() -> None:
    model = GPT(marks=True)
    spec = partition(model, language_batch(2)).sections[1].spec
    time, width = 8, 16
    products = 12 * width * width * time  # qkv, out, up, down
    attention = 2 * time * time * width
    assert spec.forward_flops == 2 * (products + attention)
    assert spec.output_bytes == time * width * 8
    assert spec.parameter_bytes == 8 * sum(p.numel() for p in model.blocks[1].parameters())
