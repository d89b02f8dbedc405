"""Gradients that are added up in place are those that autograd adds up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.run.scaled import Scaled
from varuna.partition import Section, partition
from varuna.run.inplace import InPlaceWeights
from varuna.run.precision import AutocastSpec
from varuna.run.weight_calls import Pair, tapped

CPU = torch.device("cpu")
WIDTH = 512
NUM_TOKENS = 520
LARGE = "body.layer.weight"


class Holds(nn.Module):
    """Does ``how`` with a layer of ours."""

    def __init__(self, layer: nn.Module, how: Callable[[nn.Module, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = layer
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self.layer, x)


class Counting(InPlaceWeights):
    """Notes whose gradients it was offered, and whether it took them."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self.offers: list[tuple[int, bool]] = []

    def take(self, pair: Pair) -> bool:
        taken = super().take(pair)
        self.offers.append((id(pair.weight), taken))
        return taken


def add_up(
    sections: Sequence[Section], batches: Sequence[Tensor], sink: InPlaceWeights, autocast: AutocastSpec
) -> None:
    for x in batches:
        values: tuple[Tensor, ...] = ()
        with autocast.context(), sink.collect(sections):
            for section in sections:
                values = section.run({"0": x}, values)
        values[0].backward()


def offers(
    body: nn.Module,
    batches: Sequence[Tensor],
    *,
    before: Callable[[dict[str, nn.Parameter]], None] = lambda _: None,
    autocast: AutocastSpec | None = None,
    bound: float = 1e-14,
) -> list[tuple[str, bool]]:
    """Compares the sums with a plain loop's; what was offered to the sink, and whether it took it."""
    autocast = autocast or AutocastSpec(device_type="cpu")
    dtype = batches[0].dtype if batches[0].is_floating_point() else torch.float64
    model = Scaled(body).to(dtype)
    whole = partition(model, (batches[0],), training=True, autocast=autocast)
    before(dict(model.named_parameters()))
    for x in batches:
        with autocast.context():
            loss = model(x)
        loss.backward()
    theirs = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    model.zero_grad()
    sink = Counting()
    add_up([tapped(section) for section in whole.sections], batches, sink, autocast)
    ours = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert ours[name].dtype == gradient.dtype
        assert (ours[name] - gradient).abs().max() <= bound * gradient.abs().max(), name
    names = {id(p): name for name, p in model.named_parameters()}
    return [(names[which], taken) for which, taken in sink.offers]


def floats(*shape: int, dtype: torch.dtype = torch.float64) -> list[Tensor]:
    torch.manual_seed(0)
    return [torch.randn(shape, dtype=dtype) for _ in range(3)]


def tokens() -> list[Tensor]:
    """With many doubles, and the row that is for padding."""
    torch.manual_seed(0)
    return [torch.randint(0, NUM_TOKENS, (4, 300)) for _ in range(3)]


IN_PLACE = [(LARGE, False), (LARGE, True), (LARGE, True)]
"""The first gradient becomes the sum, the others are added to it."""


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(4, WIDTH), (2, 3, WIDTH)])
def test_linear(shape: tuple[int, ...], bias: bool) -> None:
    body = Holds(nn.Linear(WIDTH, WIDTH, bias=bias), lambda layer, x: layer(x))
    assert offers(body, floats(*shape)) == IN_PLACE


def test_matmul_and_addmm() -> None:
    def how(layer: nn.Module, x: Tensor) -> Tensor:
        return x @ layer.weight + torch.addmm(layer.bias, x.tanh(), layer.weight)

    assert offers(Holds(nn.Linear(WIDTH, WIDTH), how), floats(4, WIDTH)) == [
        pair for pair in IN_PLACE for _ in range(2)
    ]


@pytest.mark.parametrize("padding", [None, 2, -1])
def test_embedding(padding: int | None) -> None:
    body = Holds(nn.Embedding(NUM_TOKENS, WIDTH, padding_idx=padding), lambda layer, x: layer(x))
    assert offers(body, tokens()) == IN_PLACE


def test_embedding_by_frequency_is_left_to_autograd() -> None:
    body = Holds(nn.Embedding(NUM_TOKENS, WIDTH, scale_grad_by_freq=True), lambda layer, x: layer(x))
    assert offers(body, tokens()) == []


def test_tied_weights_add_up() -> None:
    body = Holds(nn.Embedding(NUM_TOKENS, WIDTH), lambda layer, x: F.linear(layer(x), layer.weight))
    assert offers(body, tokens()) == [pair for pair in IN_PLACE for _ in range(2)]


def test_a_view_a_small_weight_and_a_convolution_are_left_to_autograd() -> None:
    def how(layer: nn.Module, x: Tensor) -> Tensor:
        y = x @ layer[0].weight.T
        return layer[2](layer[1](y).unsqueeze(1))

    layers = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 8), nn.Conv1d(1, 512, 800, padding=400))
    assert offers(Holds(layers, how), floats(4, WIDTH)) == []


def test_autocast_is_left_to_autograd() -> None:
    body = Holds(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x))
    autocast = AutocastSpec(device_type="cpu", dtype=torch.bfloat16)
    assert offers(body, floats(4, WIDTH, dtype=torch.float32), autocast=autocast, bound=0.02) == []


def test_a_parameter_with_a_hook_is_left_to_autograd() -> None:
    seen: list[int] = []

    def before(parameters: dict[str, nn.Parameter]) -> None:
        parameters[LARGE].register_post_accumulate_grad_hook(lambda _: seen.append(0))

    body = Holds(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x))
    assert offers(body, floats(4, WIDTH), before=before) == []
    assert len(seen) == 6


def test_a_hook_that_came_after_forward_sees_the_sum() -> None:
    """The reducer's: they are there in the last backward only."""
    body = Holds(nn.Linear(WIDTH, WIDTH), lambda layer, x: layer(x))
    batches = floats(4, WIDTH)
    whole = partition(Scaled(body).double(), (batches[0],), training=True)
    sections, sink = [tapped(section) for section in whole.sections], Counting()
    no_autocast = AutocastSpec(device_type="cpu")
    add_up(sections, batches[:2], sink, no_autocast)
    with sink.collect(sections):
        values: tuple[Tensor, ...] = ()
        for section in sections:
            values = section.run({"0": batches[2]}, values)
    seen: list[Tensor] = []
    weight = body.layer.get_parameter("weight")
    handle = weight.register_post_accumulate_grad_hook(lambda p: seen.append(p.grad.clone()))
    values[0].backward()
    handle.remove()
    assert [taken for _, taken in sink.offers] == [False, True, False]
    assert len(seen) == 1
    assert torch.equal(seen[0], weight.grad)


def test_a_frozen_bias_has_no_gradient() -> None:
    layer = nn.Linear(WIDTH, WIDTH)
    layer.bias.requires_grad_(False)
    assert offers(Holds(layer, lambda layer, x: layer(x)), floats(4, WIDTH)) == IN_PLACE
    assert layer.bias.grad is None
