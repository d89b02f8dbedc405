"""Where automatic cuts land, what users may name, and what is refused."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.partition.split_support import GPT, assert_same_step, graph_of, language_batch
from varuna.errors import CutPointError
from varuna.partition import CutPoint, partition
from varuna.partition.autocut import automatic_positions, find_cut_points


@pytest.mark.parametrize("layers", [2, 6, 12])
def test_a_transformer_is_cut_once_or_twice_per_block_where_one_tensor_is_alive(layers: int) -> None:
    model = GPT(layers=layers)
    _, flow = graph_of(model, language_batch(2))
    positions = automatic_positions(flow, model)
    assert layers <= len(positions) <= 2 * layers + 1
    assert {flow.live_bytes[position] for position in positions} == {8 * 16 * 4}
    divided = partition(model, language_batch(2))
    shares = [section.spec.forward_flops for section in divided.sections]
    assert max(shares) <= 1.5 * sum(shares) / layers


class Conv(nn.Module):
    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1, self.norm_1 = nn.Conv2d(inputs, outputs, 3, stride, 1), nn.BatchNorm2d(outputs)
        self.conv_2, self.norm_2 = nn.Conv2d(outputs, outputs, 3, 1, 1), nn.BatchNorm2d(outputs)
        self.short = nn.Conv2d(inputs, outputs, 1, stride)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)), inplace=True)
        return F.relu_(self.norm_2(self.conv_2(y)) + self.short(x))


class Pyramid(nn.Module):
    """Residual blocks over ever smaller images: the bytes alive fall along the model."""

    def __init__(self) -> None:
        super().__init__()
        shapes = [(3, 8, 1), (8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.blocks = nn.ModuleList(Conv(*shape) for shape in shapes)
        self.head = nn.Linear(32, 5)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


def test_a_pyramid_is_cut_along_its_whole_length() -> None:
    model = Pyramid().double()
    batch = {"x": torch.randn(2, 3, 16, 16).double(), "labels": torch.tensor([0, 1])}
    divided = partition(model, batch)
    assert {f"blocks.{index}" for index in range(6)} <= {section.spec.name for section in divided.sections}
    assert all(len(section.sent) == 1 for section in divided.sections)
    assert_same_step(model, divided, {"x": torch.randn(3, 3, 16, 16).double(), "labels": torch.arange(3)})


def test_a_chain_that_narrows_is_cut() -> None:
    widths = [64, 48, 32, 16]
    layers = [nn.Sequential(nn.Linear(a, b), nn.ReLU()) for a, b in pairwise(widths)]
    model = nn.Sequential(*layers, nn.Linear(16, 4))
    divided = partition(model, (torch.randn(2, 64), torch.tensor([0, 1])), loss_fn=F.cross_entropy)
    assert len(divided.sections) >= 3


def test_never_just_before_an_in_place_operator() -> None:
    _, flow = graph_of(Pyramid(), {"x": torch.randn(2, 3, 16, 16), "labels": torch.tensor([0, 1])})
    assert flow.clone_positions
    assert not flow.clone_positions & set(automatic_positions(flow, Pyramid()))


def test_a_model_without_a_good_place_is_one_section() -> None:
    class Tiny(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.only = nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.only(x).mean()

    divided = partition(Tiny(), {"x": torch.randn(2, 4)})
    assert len(divided.sections) == 1
    assert divided.sections[0].received == ()


def test_marks_come_before_automatic_places_and_names_before_marks() -> None:
    model = GPT(layers=4, marks=True)
    assert len(partition(model, language_batch(2)).sections) == 5
    named = partition(model, language_batch(2), cut_points=["blocks.1", "blocks.0"])
    assert [section.spec.name for section in named.sections] == ["tokens", "blocks.1", "blocks.2"]
    assert "blocks.1.down.weight" in named.sections[1].parameters
    assert "blocks.2.qkv.weight" in named.sections[2].parameters


def test_an_unknown_name_is_an_error_with_close_matches() -> None:
    with pytest.raises(CutPointError, match=r"'block\.1'.*'blocks\.1'"):
        partition(GPT(), language_batch(2), cut_points=["block.1"])


def test_a_module_that_leaves_nothing_in_the_graph_is_an_error() -> None:
    with pytest.raises(CutPointError, match="computes nothing"):
        partition(GPT(marks=False), language_batch(2), cut_points=["cuts.0"])


def test_marks_at_the_ends_and_side_by_side_divide_nothing() -> None:
    class Ends(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.cuts = nn.ModuleList(CutPoint() for _ in range(4))
            self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 1)

        def forward(self, x: Tensor) -> Tensor:
            h = self.cuts[2](self.cuts[1](self.a(self.cuts[0](x))))
            return self.cuts[3](self.b(h).mean())

    assert len(partition(Ends(), {"x": torch.randn(2, 4)}).sections) == 2


class OneNorm(nn.Module):
    """One BatchNorm used twice: its statistics cannot be in two sections."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.a, self.cut = nn.BatchNorm1d(4), nn.Linear(4, 4), CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.cut(self.a(self.norm(x)))).square().mean()


def test_a_cut_through_the_uses_of_a_changing_buffer_is_refused() -> None:
    model, batch = OneNorm(), {"x": torch.randn(2, 4)}
    with pytest.raises(CutPointError, match=r"norm\.(running|num)"):
        partition(model, batch)
    _, flow = graph_of(model, batch)
    assert all(position not in flow.refusals for position in automatic_positions(flow, model))


def test_find_cut_points_returns_ascending_positions_without_ends() -> None:
    model = GPT(layers=3)
    _, flow = graph_of(model, language_batch(2))
    positions = find_cut_points(flow, model, ["head", "blocks.2", "blocks.0"])
    assert positions == tuple(sorted(set(positions)))
    assert positions[0] > 0
    assert positions[-1] < len(flow.steps)


class Row(nn.Module):
    """Layers of equal width in a row, as attributes or in a list, with a small head behind them."""

    def __init__(self, kind: type[nn.Module], *, in_list: bool, head: bool) -> None:
        super().__init__()
        layers = [kind(16, 16) for _ in range(3)]
        self.blocks = nn.ModuleList(layers) if in_list else None
        if not in_list:
            self.a, self.b, self.c = layers
        self.head = nn.Linear(16, 2) if head else None

    def forward(self, x: Tensor) -> Tensor:
        for layer in (self.a, self.b, self.c) if self.blocks is None else self.blocks:
            x = layer(x)
        return (x if self.head is None else self.head(x)).square().mean()


class Gate(nn.Linear):
    """Decides by a value, so that nothing can look into it."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().mean()) < 1e9 else -x)


@pytest.mark.parametrize("kind", [Gate, nn.Linear])
@pytest.mark.parametrize("in_list", [True, False])
@pytest.mark.parametrize("head", [True, False])
def test_layers_in_a_row_are_cut_apart(kind: type[nn.Module], in_list: bool, head: bool) -> None:
    """Whether or not a list holds them, a small head follows, or they are opaque leaves."""
    torch.manual_seed(0)
    model = Row(kind, in_list=in_list, head=head)
    divided = partition(model, {"x": torch.randn(2, 16)})
    weights = [[name for name in section.parameters if name.endswith("weight")] for section in divided.sections]
    layers = [names for names in weights if names and names != ["head.weight"]]
    assert [len([name for name in names if name != "head.weight"]) for names in layers] == [1, 1, 1], weights
    assert_same_step(model, divided, {"x": torch.randn(3, 16)})
