"""CutPoint: identity for the user, a numbered node in the captured graph, one place per instance."""

import copy

import pytest
import torch
from torch import Tensor, nn

from tests.partition.capture_models import assert_same_gradients
from varuna.errors import CutPointError
from varuna.partition.capture import capture
from varuna.partition.cutpoint import CutPoint
from varuna.partition.graph import CapturedGraph, is_cut_point


class Marked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.cuts = nn.ModuleList(CutPoint() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        skip = x
        x = self.cuts[0](self.layers[0](x))
        x = self.cuts[1](self.layers[1](x))
        return (self.layers[2](x) + skip).square().mean()


class Twice(Marked):
    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = self.cuts[0](layer(x))
        return x.mean()


class Shared(Marked):
    def __init__(self) -> None:
        super().__init__()
        self.again = self.cuts[0]

    def forward(self, x: Tensor) -> Tensor:
        return self.again(self.layers[1](self.cuts[0](self.layers[0](x)))).mean()


class Inside(Marked):
    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            x = self.cuts[0](self.layers[0](x)) + 1
        return self.layers[1](x.float()).mean()


class Frozen(Marked):
    def forward(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            x = self.cuts[0](self.layers[0](x)) + 1
        return self.layers[1](self.cuts[1](x)).mean()


def _capture(model: nn.Module) -> CapturedGraph:
    return capture(model, torch.randn(3, 4), training=True, autocast=None)


def test_is_the_identity_outside_of_capture() -> None:
    cut = CutPoint()
    x = torch.randn(3, requires_grad=True)
    assert cut(x) is x
    assert cut.state_dict() == {}
    assert list(cut.parameters()) == []
    assert copy.deepcopy(nn.Sequential(cut))(x) is x


@pytest.mark.parametrize("value", [(torch.ones(2), torch.ones(2)), None, 3.0])
def test_refuses_what_is_not_one_tensor(value: object) -> None:
    with pytest.raises(CutPointError, match=type(value).__name__):
        CutPoint()(value)  # type: ignore[arg-type]


def test_marks_are_numbered_nodes_and_change_nothing() -> None:
    torch.manual_seed(0)
    model = Marked()
    graph = _capture(model)
    marks = [node for node in graph.graph.nodes if is_cut_point(node)]
    assert [node.args[1] for node in marks] == [0, 1]
    assert [node.meta["module_path"] for node in marks] == ["cuts.0", "cuts.1"]
    for n in (3, 1, 4):
        assert_same_gradients(model, graph, torch.randn(n, 4))


def test_unused_mark_is_not_in_the_graph() -> None:
    model = Twice()
    model.layers = model.layers[:1]
    assert sum(is_cut_point(node) for node in _capture(model).graph.nodes) == 1


@pytest.mark.parametrize("kind", [Twice, Shared])
def test_two_uses_of_one_instance(kind: type[nn.Module]) -> None:
    with pytest.raises(CutPointError, match=r"The CutPoint 'cuts\.0' is called twice"):
        _capture(kind())


def test_mark_inside_a_block_that_cannot_be_divided() -> None:
    with pytest.raises(CutPointError, match=r"cuts\.0 at .*autocast"):
        _capture(Inside())


def test_mark_inside_no_grad() -> None:
    model = Frozen()
    graph = _capture(model)
    assert sum(is_cut_point(node) for node in graph.graph.nodes) == 2
    assert_same_gradients(model, graph, torch.randn(4, 4))
