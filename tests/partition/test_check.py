"""The start-up check: silent when right, names the section when wrong, disturbs nothing."""

from __future__ import annotations

import contextlib
import dataclasses
from dataclasses import dataclass
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import fx, nn

from tests.partition.split_support import GPT, graph_of, language_batch
from varuna.errors import CheckFailed
from varuna.partition import partition
from varuna.partition.autocut import find_cut_points
from varuna.partition.check import check_bytes, check_split, tolerance_for, why_not_checked
from varuna.partition.flow import flow_of
from varuna.partition.split import split


@dataclass(frozen=True)
class Bf16:
    device_type: str = "cpu"
    dtype: torch.dtype = torch.bfloat16

    def context(self) -> contextlib.AbstractContextManager[Any]:
        return torch.autocast("cpu", self.dtype)


@pytest.mark.parametrize(("dtype", "bound"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
def test_holds_with_dropout_and_tied_weights(dtype: torch.dtype, bound: float) -> None:
    model = GPT(marks=True, dropout=0.3).to(dtype)
    assert check_split(model, partition(model, language_batch(2)), language_batch(2)) <= bound


def test_holds_under_autocast_and_with_a_loss_function() -> None:
    model = GPT(marks=True)
    divided = partition(model, language_batch(2), autocast=Bf16())
    assert check_split(model, divided, language_batch(2), autocast=Bf16()) <= 0.1
    chain = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))
    batch = (torch.randn(3, 4), torch.tensor([0, 1, 2]))
    divided = partition(chain, batch, loss_fn=F.cross_entropy, cut_points=["0"])
    assert check_split(chain, divided, batch, loss_fn=F.cross_entropy) <= 1e-4


class Normed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.norm, self.b = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.b(torch.tanh(self.norm(self.a(x)))).square().mean()


def test_disturbs_nothing() -> None:
    model = Normed().eval()
    model.a.weight.grad = torch.ones(4, 4)
    grad = model.a.weight.grad
    batch = {"x": torch.randn(3, 4)}
    divided = partition(model, batch)
    state = {name: value.clone() for name, value in model.state_dict().items()}
    objects = {name: id(value) for name, value in model.named_buffers()}
    generator = torch.get_rng_state()
    check_split(model, divided, batch)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert {name: id(value) for name, value in model.named_buffers()} == objects
    assert torch.equal(torch.get_rng_state(), generator)
    assert model.a.weight.grad is grad
    assert torch.equal(grad, torch.ones(4, 4))
    assert model.b.weight.grad is None
    assert not model.training


def _corrupted(model: nn.Module, target: Any, section_index: int, change: Any) -> Any:
    """A partition whose graph differs from the model in one operator of one section."""
    graph, flow = graph_of(model, language_batch(2))
    bounds = [0, *find_cut_points(flow, model), len(flow.steps)]
    names = {node.name for node in flow.steps[bounds[section_index] : bounds[section_index + 1]]}
    copied, made = fx.Graph(), {}
    for node in graph.graph.nodes:
        made[node] = copied.node_copy(node, made.__getitem__)
    node = next(n for n in copied.nodes if n.target is target and n.name in names)
    change(node)
    changed = flow_of(dataclasses.replace(graph, graph=copied), model)
    return split(model, changed, find_cut_points(changed, model))


@pytest.mark.parametrize("section_index", [1, 2])
def test_a_corrupted_operator_is_found_in_its_section(section_index: int) -> None:
    model = GPT(marks=True, dropout=0.2).double()
    divided = _corrupted(
        model,
        torch.ops.aten.gelu.default,
        section_index,
        lambda node: setattr(node, "kwargs", {"approximate": "tanh"}),
    )
    with pytest.raises(
        CheckFailed, match=rf"section {section_index} \(blocks\.{section_index}\).*'blocks\.{section_index}"
    ):
        check_split(model, divided, language_batch(2))


def test_a_wrong_gradient_alone_is_found_in_its_section() -> None:
    model = GPT(marks=True).double()

    def detach(node: fx.Node) -> None:
        with node.graph.inserting_after(node):
            cut = node.graph.call_function(torch.ops.aten.detach.default, (node,))
        cut.meta = dict(node.meta)
        node.replace_all_uses_with(cut, delete_user_cb=lambda user: user is not cut)

    divided = _corrupted(model, torch.ops.aten.gelu.default, 1, detach)
    with pytest.raises(CheckFailed, match=r"section 1 \(blocks\.1\).*gradient of 'blocks\.1\.up"):
        check_split(model, divided, language_batch(2))


def test_reasons_not_to_check() -> None:
    model = GPT()
    divided = partition(model, language_batch(2))
    needed = check_bytes(divided, 2)
    assert needed > 2 * sum(p.numel() * 4 for p in model.parameters())
    cpu = torch.device("cpu")
    assert why_not_checked(model, divided, cpu) == ""
    assert why_not_checked(model, divided, cpu, available_bytes=needed) == ""
    assert "GB are free" in why_not_checked(model, divided, cpu, available_bytes=needed - 1)
    with torch.device("meta"):
        assert "meta device" in why_not_checked(GPT(), divided, cpu)
    assert why_not_checked(model, divided, torch.device("cuda")) == ""
    random = partition(GPT(dropout=0.1), language_batch(2))
    assert "attention" in why_not_checked(model, random, torch.device("cuda"))


def test_tolerance_follows_the_coarsest_dtype() -> None:
    model = GPT()
    assert tolerance_for(model, None) == 1e-3
    assert tolerance_for(model.double(), None) == 1e-9
    assert tolerance_for(model, Bf16()) == 1e-1
