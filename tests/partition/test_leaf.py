"""Modules that decide by values become opaque leaves, and compute the same."""

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.partition.capture_models import MODELS, assert_same_gradients
from varuna.errors import CaptureError
from varuna.partition.capture import capture
from varuna.partition.cutpoint import CutPoint
from varuna.partition.graph import CapturedGraph, values_of
from varuna.partition.signature import signature_of


class Decides(nn.Module):
    """Takes and gives structures; its result depends on the sign of a sum."""

    def __init__(self, width: int = 4) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, rows: int) -> dict[str, Any]:
        x, y = pair
        h = self.linear(x)
        if h.sum() > 0:
            h = -h
        self.seen += 1
        return {"main": h * scale, "more": [y + 1, None], "rows": x.new_ones(rows, 2)}


class Model(nn.Module):
    def __init__(self, inner: type[nn.Module] = Decides) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4)
        self.inners = nn.ModuleList(inner() for _ in range(2))
        self.last = nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x)
        for inner in self.inners:
            out = inner((x, x * 2), scale=0.5, rows=x.shape[0])
            x = out["main"] + out["more"][0] + out["rows"].sum(dim=1, keepdim=True)
        return self.last(x).mean()


def _capture(model: nn.Module, opaque: tuple[str, ...] = ()) -> CapturedGraph:
    return capture(model, torch.randn(3, 4), training=True, autocast=None, opaque=opaque)


def _leaf_calls(graph: CapturedGraph) -> list[Any]:
    return [node for node in graph.graph.nodes if node.op == "call_module"]


def test_found_by_itself(capfd: pytest.CaptureFixture[str]) -> None:
    torch.manual_seed(0)
    model = Model()
    capfd.readouterr()
    graph = _capture(model)
    assert capfd.readouterr() == ("", "")
    assert graph.opaque == ("inners.0", "inners.1")
    assert graph.dynamic_batch
    calls = _leaf_calls(graph)
    assert [node.target for node in calls] == ["inners.0", "inners.1"]
    assert [node.meta["module_path"] for node in calls] == ["inners.0", "inners.1"]
    assert calls[0].kwargs["scale"] == 0.5
    assert calls[0].meta["sizes"] == (("b", 4), ("b", 4), ("b", 2))
    assert [tuple(value.shape) for value in values_of(calls[0])] == [(2, 4), (2, 4), (2, 2)]
    for n in (3, 1, 4):
        assert_same_gradients(model, graph, torch.randn(n, 4))
    assert all(float(inner.seen) == 3 for inner in model.inners)
    assert "forward" not in vars(model.inners[0])


def test_named_by_the_user() -> None:
    model = Model()
    graph = _capture(model, opaque=("first", "inners.0", "inners.0.linear"))
    assert graph.opaque == ("first", "inners.0", "inners.1")
    assert_same_gradients(model, graph, torch.randn(4, 4))


def test_an_own_forward_is_kept() -> None:
    model = Model()
    original = model.first.forward
    model.first.forward = lambda x: original(x) * 3  # type: ignore[method-assign]
    given = model.first.forward
    graph = _capture(model, opaque=("first",))
    assert vars(model.first)["forward"] is given
    assert_same_gradients(model, graph, torch.randn(4, 4))


def test_nothing_is_needed_of_the_weights() -> None:
    with torch.device("meta"):
        empty = Model()
    there = capture(empty, signature_of(torch.randn(3, 4)), training=True, autocast=None)
    assert all(parameter.is_meta for parameter in empty.parameters())
    assert str(there.graph) == str(_capture(Model()).graph)


def test_buffers_and_random_numbers_stay() -> None:
    model = Model()
    random = torch.get_rng_state()
    capture(model, signature_of(torch.zeros(3, 4)), training=True, autocast=None)
    assert torch.equal(torch.get_rng_state(), random)
    assert float(model.inners[0].seen) == 0


def test_mixtral_with_eager_experts_on_meta() -> None:
    torch.manual_seed(0)
    with torch.device("meta"):
        model, batch = MODELS["mixtral-eager"]()
    graph = capture(model.train(), batch(3), training=True, autocast=None)
    assert graph.opaque == ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    assert graph.dynamic_batch
    assert _leaf_calls(graph)[0].meta["sizes"] == (("7*b", 32),)


class Longer(nn.Module):
    """Its leaf gives two rows per sample and one more."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.ends = nn.Linear(4, 4), Ends()

    def forward(self, x: Tensor) -> Tensor:
        return self.ends(self.first(x)).square().mean()


class Ends(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([x, x, x[:1]]) if x.sum() > 0 else torch.cat([x, -x, x[:1]])


def test_sizes_follow_the_batch() -> None:
    model = Longer()
    graph = _capture(model)
    assert _leaf_calls(graph)[0].meta["sizes"] == (("2*b + 1", 4),)
    for n in (3, 1, 5):
        assert_same_gradients(model, graph, torch.randn(n, 4))


class InNoGrad(Model):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            frozen = self.inners[0]((x, x), scale=1.0, rows=1)["main"]
        return self.last(self.first(x) + frozen).mean()


def test_leaf_in_no_grad() -> None:
    model = InNoGrad()
    graph = _capture(model)
    assert [node.target for node in _leaf_calls(graph)] == ["inners.0"]
    assert_same_gradients(model, graph, torch.randn(4, 4))


# --- what cannot be a leaf ------------------------------------------------------------------


class Broken(Decides):
    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, rows: int) -> dict[str, Any]:
        if pair[0].sum() > 0 or True:
            raise RuntimeError("broken on purpose")


class Slow:
    pass


class GivesObject(Decides):
    def forward(self, pair: tuple[Tensor, Tensor], *, scale: float, rows: int) -> Any:
        return object() if pair[0].sum() > 0 else Slow()


class Big(Decides):
    def __init__(self) -> None:
        super().__init__()
        self.huge = nn.Linear(100, 100)


class WithMark(Decides):
    def __init__(self) -> None:
        super().__init__()
        self.cut = CutPoint()


@pytest.mark.parametrize(
    ("inner", "words"),
    [
        (Broken, r"test_leaf\.py:\d+: `if pair\[0\]\.sum\(\) > 0 or True:`"),
        (GivesObject, "takes or gives a (object|Slow)"),
        (WithMark, "'inners.0' holds CutPoints.*Three ways out"),
    ],
)
def test_refused(inner: Any, words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        _capture(Model(inner))


@pytest.mark.parametrize(("opaque", "words"), [(("nowhere",), "no such module"), (("",), "whole model")])
def test_bad_names(opaque: tuple[str, ...], words: str) -> None:
    with pytest.raises(CaptureError, match=words):
        _capture(Model(), opaque=opaque)


def test_most_of_the_model_cannot_be_a_leaf() -> None:
    model = Model()
    model.inners = nn.ModuleList([Big()])
    with pytest.raises(CaptureError, match="holds 100% of the parameters"):
        _capture(model)


# --- gradients of the user's own ------------------------------------------------------------


class DoubledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x.clamp(-1, 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient * 2


class Doubles(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return DoubledGradient.apply(x)


class UsesDoubles(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear, self.doubles = nn.Linear(4, 4), Doubles()

    def forward(self, x: Tensor) -> Tensor:
        return self.doubles(self.linear(x)).square().mean()


class DoublesAtTheTop(UsesDoubles):
    def forward(self, x: Tensor) -> Tensor:
        return DoubledGradient.apply(self.linear(x)).square().mean()


def test_an_autograd_function_keeps_its_backward() -> None:
    model = UsesDoubles()
    apply = torch.autograd.Function.__dict__["apply"]
    graph = _capture(model)
    assert graph.opaque == ("doubles",)
    assert torch.autograd.Function.__dict__["apply"] is apply
    assert_same_gradients(model, graph, torch.randn(5, 4))
    with pytest.raises(
        CaptureError, match=r"DoubledGradient is a torch\.autograd\.Function.*test_leaf\.py:\d+"
    ):
        _capture(DoublesAtTheTop())


class Checkpointed(nn.Module):
    def __init__(self, reentrant: bool) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5))
        self.linear, self.reentrant = nn.Linear(4, 4), reentrant

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        return checkpoint(self.block, h, use_reentrant=self.reentrant).square().mean()


@pytest.mark.parametrize("reentrant", [False, True])
def test_activation_checkpoints_of_the_model(reentrant: bool) -> None:
    model = Checkpointed(reentrant)
    assert_same_gradients(model, _capture(model), torch.randn(5, 4))
