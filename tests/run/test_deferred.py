"""Backward in two parts gives the gradients of backward in one, whoever calls the operators."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.run.scaled import Scaled
from varuna.partition import Partition, Section, partition
from varuna.run.deferred import PendingWeights
from varuna.run.precision import AutocastSpec
from varuna.run.stage import ModelStage, StageInputs
from varuna.run.stage_sections import StageSections
from varuna.run.weight_calls import tapped

CPU = torch.device("cpu")
NO_AUTOCAST = AutocastSpec(device_type="cpu")


class Times(nn.Module):
    """Calls ``function(input, weight, bias)``."""

    def __init__(self, function: Callable[..., Tensor], *shape: int) -> None:
        super().__init__()
        self.function = function
        self.weight = nn.Parameter(torch.randn(shape))
        self.bias = nn.Parameter(torch.randn(shape[-1]))

    def forward(self, x: Tensor) -> Tensor:
        return self.function(x, self.weight, self.bias)


class RowBias(nn.Module):
    """A linear layer whose bias is another one for each of three rows."""

    def __init__(self) -> None:
        super().__init__()
        self.weight, self.bias = nn.Parameter(torch.randn(5, 6)), nn.Parameter(torch.randn(3, 5))

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


class Twice(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(self.layer(x).tanh())


class Tied(nn.Module):
    """An embedding whose weight is the head's too, both as it is and transposed."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens = nn.Embedding(7, 6, padding_idx=2)
        self.head = nn.Linear(6, 7, bias=False)
        self.head.weight = self.tokens.weight

    def forward(self, x: Tensor) -> Tensor:
        h = self.tokens(x)
        return self.head(h) + h.tanh() @ self.tokens.weight.T


def frozen(module: nn.Module, *names: str) -> nn.Module:
    for name in names:
        module.get_parameter(name).requires_grad_(False)
    return module


def partition_of(
    body: nn.Module, x: Tensor, *, opaque: bool = False, autocast: AutocastSpec = NO_AUTOCAST
) -> Partition:
    model = Scaled(body).to(x.dtype if x.is_floating_point() else torch.float64)
    return partition(model, (x,), training=True, autocast=autocast, opaque=["body"] if opaque else [])


def run(
    sections: Sequence[Section], x: Tensor, pending: PendingWeights | None, autocast: AutocastSpec = NO_AUTOCAST
) -> Tensor:
    """Forward and (B of) backward; the loss."""
    with contextlib.nullcontext() if pending is None else pending.collect(sections):
        values: tuple[Tensor, ...] = ()
        with autocast.context():
            for section in sections:
                values = section.run({"0": x}, values)
    values[0].backward()
    return values[0].detach()


def parameters_of(sections: Sequence[Section]) -> dict[str, nn.Parameter]:
    return {name: p for section in sections for name, p in section.parameters.items()}


def take_gradients(sections: Sequence[Section]) -> dict[str, Tensor]:
    parameters = parameters_of(sections)
    found = {name: p.grad for name, p in parameters.items() if p.grad is not None}
    for parameter in parameters.values():
        parameter.grad = None
    return found


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], bound: float = 1e-14) -> None:
    assert ours.keys() == theirs.keys()
    for name, gradient in theirs.items():
        assert ours[name].dtype == gradient.dtype
        assert (ours[name] - gradient).abs().max() <= bound * gradient.abs().max(), name


def put_off(
    whole: Partition, x: Tensor, *, bound: float = 1e-14, autocast: AutocastSpec = NO_AUTOCAST
) -> set[str]:
    """Compares both ways; names of the parameters that had no gradient before W."""
    loss = run(whole.sections, x, None, autocast)
    theirs = take_gradients(whole.sections)
    sections = [tapped(section) for section in whole.sections]
    pending = PendingWeights(CPU)
    assert torch.equal(run(sections, x, pending, autocast), loss)
    parameters = parameters_of(sections)
    without = {name for name in theirs if parameters[name].grad is None}
    names = {id(p): name for name, p in parameters.items()}
    assert {names[id(p)] for p in pending.additions()} >= without
    pending.run()
    assert (pending.num_bytes, not pending.additions()) == (0, True)
    assert_equal(take_gradients(sections), theirs, bound)
    return without


# --- operators ------------------------------------------------------------------------------

BOTH = {"body.weight", "body.bias"}
ROWS, DEEP = (4, 6), (4, 3, 6)

OPERATORS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...], set[str]]] = {
    "linear": (lambda: nn.Linear(6, 5), ROWS, BOTH),
    "linear_3d": (lambda: nn.Linear(6, 5), DEEP, BOTH),
    "linear_1d": (lambda: Times(lambda x, w, b: F.linear(x.sum(0), w), 5, 6), ROWS, {"body.weight"}),
    "linear_without_bias": (lambda: nn.Linear(6, 5, bias=False), DEEP, {"body.weight"}),
    "linear_row_bias": (RowBias, DEEP, BOTH),
    "addmm": (lambda: Times(lambda x, w, b: torch.addmm(b, x, w), 6, 5), ROWS, BOTH),
    "addmm_scaled": (lambda: Times(lambda x, w, b: torch.addmm(b, x, w, alpha=2), 6, 5), ROWS, set()),
    "addmm_full_bias": (lambda: Times(lambda x, w, b: torch.addmm(b[None], x, w), 6, 5), ROWS, BOTH),
    "matmul": (lambda: Times(lambda x, w, b: x @ w + b, 6, 5), DEEP, {"body.weight"}),
    "matmul_of_a_view": (
        lambda: Times(lambda x, w, b: x @ w.T + x @ w[:, :6].t(), 6, 6),
        DEEP,
        {"body.weight"},
    ),
    "matmul_from_the_left": (lambda: Times(lambda x, w, b: w @ x.mT, 6, 6), DEEP, set()),
    "mm": (lambda: Times(lambda x, w, b: torch.mm(x, w), 6, 5), ROWS, {"body.weight"}),
    "not_a_parameter": (lambda: Times(lambda x, w, b: x @ w.exp(), 6, 5), DEEP, set()),
    "conv1d": (lambda: nn.Conv1d(6, 4, 3, stride=2, padding=1, groups=2), (4, 6, 9), BOTH),
    "conv2d": (lambda: nn.Conv2d(2, 4, (3, 2), dilation=(1, 2)), (4, 2, 7, 6), BOTH),
    "conv2d_without_bias": (lambda: nn.Conv2d(2, 4, 3, bias=False), (4, 2, 7, 6), {"body.weight"}),
    "conv2d_same": (lambda: nn.Conv2d(2, 4, 3, padding="same"), (4, 2, 7, 6), set()),
    "conv3d": (lambda: nn.Conv3d(2, 3, 2), (4, 2, 3, 4, 3), BOTH),
    "frozen_weight": (lambda: frozen(nn.Linear(6, 5), "weight"), DEEP, set()),
    "frozen_bias": (lambda: frozen(nn.Linear(6, 5), "bias"), DEEP, {"body.weight"}),
    "used_twice": (Twice, DEEP, {"body.layer.weight", "body.layer.bias"}),
    "norm": (lambda: nn.Sequential(nn.LayerNorm(6), nn.Linear(6, 5)), DEEP, {"body.1.weight", "body.1.bias"}),
}


@pytest.mark.parametrize("opaque", [False, True], ids=["graph", "module"])
@pytest.mark.parametrize("name", OPERATORS)
def test_gradients_are_those_of_backward_in_one(name: str, opaque: bool) -> None:
    make, shape, expected = OPERATORS[name]
    torch.manual_seed(0)
    x = torch.randn(shape, dtype=torch.float64)
    assert put_off(partition_of(make(), x, opaque=opaque), x) == expected


@pytest.mark.parametrize("opaque", [False, True], ids=["graph", "module"])
def test_tied_weights_add_up(opaque: bool) -> None:
    torch.manual_seed(0)
    x = torch.tensor([[0, 1, 2, 2], [3, 6, 1, 0]])
    assert "body.tokens.weight" in put_off(partition_of(Tied(), x, opaque=opaque), x)


@pytest.mark.parametrize("opaque", [False, True], ids=["graph", "module"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype: torch.dtype, opaque: bool) -> None:
    """Both ways multiply the same rounded numbers; the sums' order may differ."""
    torch.manual_seed(0)
    autocast = AutocastSpec(device_type="cpu", dtype=dtype)
    x = torch.randn(8, 2, 9)
    body = nn.Sequential(nn.Conv1d(2, 6, 3), nn.GELU(), nn.Linear(7, 7), nn.LayerNorm(7), nn.Linear(7, 3))
    whole = partition_of(body, x, opaque=opaque, autocast=autocast)
    bound = 4 * torch.finfo(dtype).eps
    assert put_off(whole, x, bound=bound, autocast=autocast) >= {
        "body.0.weight",
        "body.2.bias",
        "body.4.weight",
    }


def test_a_chain_of_modules_that_cannot_be_captured() -> None:
    class Steps(nn.Linear):
        def forward(self, input: Tensor) -> Tensor:
            return super().forward(input) if input.sum().item() > -1e9 else input

    torch.manual_seed(0)
    chain = nn.Sequential(*[Steps(6, 6) for _ in range(3)]).double()
    x = torch.randn(4, 6, dtype=torch.float64)
    whole = partition(chain, (x, x), training=True, autocast=NO_AUTOCAST, loss_fn=F.mse_loss)
    assert len(whole.sections) == 3

    def both(sections: Sequence[Section], pending: PendingWeights | None) -> None:
        with contextlib.nullcontext() if pending is None else pending.collect(sections):
            values: tuple[Tensor, ...] = ()
            for section in sections:
                values = section.run({"0": x, "1": x.cos()}, values)
        values[0].backward()

    both(whole.sections, None)
    theirs = take_gradients(whole.sections)
    pending = PendingWeights(CPU)
    both([tapped(section) for section in whole.sections], pending)
    assert not take_gradients(whole.sections)
    pending.run()
    assert_equal(take_gradients(whole.sections), theirs)


# --- what modules may do ----------------------------------------------------------------------


class Unusual(nn.Module):
    """A module that runs as it is, and does ``how`` with ``self.layer``."""

    def __init__(self, how: Callable[[Unusual, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(6, 6)
        self.how = how

    def forward(self, x: Tensor) -> Tensor:
        return self.how(self, x)


def gradient_penalty(module: Unusual, x: Tensor) -> Tensor:
    if not torch.is_grad_enabled():
        return module.layer(x)
    with torch.enable_grad():
        y = module.layer(x).tanh()
        (of_input,) = torch.autograd.grad(y.sum(), x, create_graph=True)
        (of_weight,) = torch.autograd.grad(module.layer(x).cos().sum(), module.layer.weight, create_graph=True)
    return y + of_input + of_weight.sum()


def mapped(module: Unusual, x: Tensor) -> Tensor:
    return torch.func.vmap(module.layer)(x)


class Inner(torch.autograd.Function):
    """Runs a layer in backward, and takes its gradients there."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: nn.Linear, *_parameters: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        ctx.layer = layer
        return layer(x)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        (x,) = ctx.saved_tensors
        with torch.enable_grad():
            x = x.detach().requires_grad_()
            y = ctx.layer(x)
            of_x, of_weight, of_bias = torch.autograd.grad(y, [x, *ctx.layer.parameters()], gradients)
        return of_x, None, of_weight, of_bias


class Stops(torch.autograd.Function):
    """Gives no gradient."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> None:
        return None


UNUSUAL: dict[str, tuple[Callable[[Unusual, Tensor], Tensor], set[str]]] = {
    "gradient_penalty": (gradient_penalty, {"body.layer.bias"}),
    "vmap": (mapped, set()),
    "gradients_in_backward": (lambda m, x: Inner.apply(x, m.layer, *m.layer.parameters()), set()),
    "checkpoint": (lambda m, x: checkpoint(lambda v: m.layer(v).tanh(), x, use_reentrant=False), set()),
    "reentrant": (lambda m, x: checkpoint(lambda v: m.layer(v).tanh(), x, use_reentrant=True), set()),
    "no_gradient": (lambda m, x: Stops.apply(m.layer(x)) + x, set()),
    "detached": (lambda m, x: m.layer(x).detach() + m.layer(x), {"body.layer.weight", "body.layer.bias"}),
}


@pytest.mark.parametrize("name", UNUSUAL)
def test_modules_may_take_gradients_themselves(name: str) -> None:
    how, expected = UNUSUAL[name]
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    assert put_off(partition_of(Unusual(how), x, opaque=True), x) == expected


def test_a_parameter_with_a_hook_keeps_its_gradient_in_b() -> None:
    torch.manual_seed(0)
    x = torch.randn(4, 6, dtype=torch.float64)
    whole = partition_of(nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 6)), x)
    parameters = parameters_of(whole.sections)
    seen: list[Tensor | None] = []
    parameters["body.0.weight"].register_hook(lambda gradient: gradient * 2)
    parameters["body.1.bias"].register_post_accumulate_grad_hook(lambda parameter: seen.append(parameter.grad))
    assert not put_off(whole, x)
    assert len(seen) == 2
    assert None not in seen


# --- memory -----------------------------------------------------------------------------------


def test_b_frees_what_w_does_not_need_and_w_the_rest_as_it_goes() -> None:
    kept: dict[str, weakref.ref[Tensor]] = {}

    class Watched(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(6, 50), nn.Linear(50, 6)

        def forward(self, x: Tensor) -> Tensor:
            wide = self.up(x)
            kept["input of down"], kept["input of tanh"] = weakref.ref(wide.tanh()), weakref.ref(wide)
            narrow = wide.tanh()
            kept["input of down"] = weakref.ref(narrow)
            return self.down(narrow)

    x = torch.randn(4, 6, dtype=torch.float64)
    sections = [tapped(section) for section in partition_of(Watched(), x, opaque=True).sections]
    kept.clear()
    pending = PendingWeights(CPU)
    run(sections, x, pending)
    assert {name: ref() is not None for name, ref in kept.items()} == {
        "input of down": True,
        "input of tanh": False,
    }
    # down: [4, 50] and [4, 6]; up: [4, 6] and [4, 50]
    assert pending.num_bytes == 8 * 4 * (50 + 6 + 6 + 50)
    left: list[int] = []
    parameters = parameters_of(sections)
    parameters["body.up.weight"].register_post_accumulate_grad_hook(lambda _: left.append(pending.num_bytes))
    pending.run()
    assert left == [0]
    assert kept["input of down"]() is None


# --- a stage ----------------------------------------------------------------------------------


def stages_of(whole: Partition, x: Tensor, split: bool, events: list[Any]) -> list[ModelStage]:
    borders = (0, 2, len(whole.sections))
    return [
        ModelStage(
            sections=StageSections(borders[index], borders[index + 1], lambda *_: whole, split=split),
            load=lambda k, _: StageInputs(signature=None, tensors={"0": x[k : k + 1]}, num_samples=1),
            is_first=index == 0,
            is_last=index == 1,
            training=True,
            autocast=NO_AUTOCAST,
            seed=0,
            device=CPU,
            before_final_backward=lambda *additions, index=index: events.append((index, *additions)),
        )
        for index in range(2)
    ]


@pytest.mark.parametrize("recompute", [False, True])
def test_two_stages_with_dropout_by_hand(recompute: bool) -> None:
    torch.manual_seed(0)
    x = torch.randn(3, 6, dtype=torch.float64)
    layers = [nn.Sequential(nn.Linear(6, 6), nn.Dropout(0.5), nn.LayerNorm(6)) for _ in range(4)]
    model = Scaled(nn.Sequential(*layers)).double()
    cut_points = [f"body.{index}" for index in range(3)]
    whole = partition(model, (x,), training=True, autocast=NO_AUTOCAST, cut_points=cut_points)
    results = []
    for split in (False, True):
        events: list[Any] = []
        first, last = stages = stages_of(whole, x, split, events)
        for stage in stages:
            stage.begin_step(5)
        sent = [first.forward(k, None, save_activations=not recompute) for k in range(3)]
        for k in range(3):
            last.forward(k, sent[k], save_activations=not recompute)
            if recompute:
                first.recompute(k)
                last.recompute(k)
            back = last.backward(k, None, is_final=k == 2, split=split)
            first.backward(k, back, is_final=k == 2, split=split)
        if split:
            assert {name for name, p in model.named_parameters() if p.grad is None} == {
                f"body.{index}.0.{what}" for index in range(4) for what in ("weight", "bias")
            }
            assert not events
            for k in range(3):
                for stage in stages:
                    stage.weight_gradients(k, is_final=k == 2)
            named = {id(p): name for name, p in model.named_parameters()}
            found = [(index, {named[id(p)]: n for p, n in additions.items()}) for index, additions in events]
            assert found == [
                (index, {f"body.{layer}.0.{what}": 1 for layer in layers for what in ("weight", "bias")})
                for index, layers in ((0, (1, 0)), (1, (3, 2)))
            ]
        else:
            assert events == [(1,), (0,)]
        results.append((take_gradients(whole.sections), last.totals()))
    assert_equal(results[1][0], results[0][0])
    assert results[0][1] == results[1][1]
