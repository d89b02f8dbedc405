"""Captured graphs compute what the model computes, for any number of samples, under the user's own names."""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.partition.capture_models import (
    MODELS,
    VOCABULARY,
    Own,
    assert_same_gradients,
    own_batch,
    whisper,
    without_dropout,
)
from varuna.errors import CaptureError, DataError, LossError
from varuna.partition.capture import capture
from varuna.partition.graph import (
    CapturedGraph,
    batch_dims_of,
    executable,
    input_key,
    nodes_with_subgraphs,
    values_of,
)
from varuna.partition.loss import Loss, loss_of
from varuna.partition.signature import signature_of
from varuna.run.precision import AutocastSpec

BF16 = AutocastSpec(device_type="cpu", dtype=torch.bfloat16)


def _own(**changes: Any) -> Own:
    torch.manual_seed(0)
    return Own(**changes)


def _train(model: nn.Module, batch: Any) -> CapturedGraph:
    return capture(model, batch, training=True, autocast=None)


# --- the same gradients ---------------------------------------------------------------------


@pytest.mark.parametrize("dropout", [False, True], ids=["no-dropout", "dropout"])
@pytest.mark.parametrize("name", MODELS)
def test_hugging_face_models(name: str, dropout: bool) -> None:
    torch.manual_seed(0)
    model, batch = MODELS[name]()
    exact = not name.startswith("mixtral")  # its router computes in fp32 only
    model = (model.double() if exact else model).train()
    if not dropout:
        without_dropout(model)
    graph = _train(model, batch(3))
    assert graph.dynamic_batch
    assert graph.opaque == (
        () if name != "mixtral-eager" else ("model.layers.0.mlp.experts", "model.layers.1.mlp.experts")
    )
    for n in (3, 1, 4):
        assert_same_gradients(model, graph, batch(n), bound=1e-15 if exact else 2e-6)


def test_own_model_with_buffers_ties_and_constants() -> None:
    model = _own().double()
    graph = _train(model, own_batch(3))
    assert graph.dynamic_batch
    for n in (3, 2, 4):  # batch norm refuses one sample
        assert_same_gradients(model, graph, own_batch(n))
    assert float(model.calls) > 0
    assert int(model.blocks[0].norm.num_batches_tracked) > 0


def test_bf16_autocast() -> None:
    model = _own()
    graph = capture(model, own_batch(3), training=True, autocast=BF16)
    dtypes = {value.dtype for node in graph.graph.nodes for value in values_of(node)}
    assert torch.bfloat16 in dtypes
    assert_same_gradients(model, graph, own_batch(4), autocast=BF16)


class Regions(nn.Module):
    """Nested autocast and no_grad regions, and a change of an input in place."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        x.mul_(2)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.linear(x)
            with torch.no_grad():
                h2 = self.linear(h)
        with torch.autocast("cpu", enabled=False):
            return (h.float() + h2.float()).square().mean() + x.sum()


def test_nested_regions_and_inputs_changed_in_place() -> None:
    model = Regions()
    graph = _train(model, torch.randn(3, 4))
    assert len(graph.subgraphs) == 2
    x = torch.randn(4, 4)
    want_x = x.clone()
    want = model(want_x)
    (got,) = executable(graph, model)(x)
    assert torch.equal(got, want)
    assert torch.equal(x, want_x)
    got.backward()
    got_gradient = model.linear.weight.grad
    model.linear.weight.grad = None
    want.backward()
    assert torch.equal(got_gradient, model.linear.weight.grad)
    assert not any("_assert" in str(node.target) for node in nodes_with_subgraphs(graph))


# --- the graph ------------------------------------------------------------------------------


def test_names_are_the_users() -> None:
    model = _own()
    graph = _train(model, own_batch(3))
    attributes = {node.target for node in graph.graph.nodes if node.op == "get_attr"} - set(graph.subgraphs)
    assert attributes - set(graph.constants) <= {*dict(model.named_parameters()), *dict(model.named_buffers())}
    assert graph.aliases == {"head.weight": "embedding.weight"}
    assert "head.weight" not in attributes
    assert set(graph.constants) == {"offset"}
    assert graph.constants["offset"].data_ptr() == model.offset.data_ptr()
    placeholders = [node for node in graph.graph.nodes if node.op == "placeholder"]
    assert [input_key(node) for node in placeholders] == list(graph.input_keys) == ["x", "y"]
    paths = {node.meta["module_path"] for node in graph.graph.nodes}
    assert {"", "embedding", "blocks.0.norm", "blocks.1.linear", "head"} <= paths


def test_values_are_plain_meta_tensors_at_the_example_size() -> None:
    graph = _train(_own(), own_batch(3))
    (linear, *_) = [node for node in graph.graph.nodes if "aten.linear" in str(node.target)]
    (value,) = values_of(linear)
    assert type(value) is Tensor
    assert value.is_meta
    assert value.shape == (graph.example_batch_size, 8)
    assert linear.meta["sizes"] == (("b", 8),)
    assert batch_dims_of(linear) == (0,)
    assert "capture_models.py" in linear.meta["stack_trace"] or "linear.py" in linear.meta["stack_trace"]


def test_every_tensor_value_has_sizes() -> None:
    model, batch = MODELS["t5"]()
    for node in nodes_with_subgraphs(_train(model, batch(3))):
        assert len(node.meta.get("sizes", ())) == len(values_of(node))
        for value, sizes in zip(values_of(node), node.meta.get("sizes", ()), strict=True):
            for size, text in zip(value.shape, sizes, strict=True):
                assert size == text or size == eval(str(text), {"b": 2})


def test_the_graph_does_not_depend_on_where_the_model_is() -> None:
    here = _train(_own(), own_batch(3))
    with torch.device("meta"):
        empty = Own()
    empty.offset = torch.arange(8.0)
    mixed = _own()
    mixed.blocks[1].to("meta")
    signature = signature_of(own_batch(3), 3)
    for model in (empty, mixed):
        there = _train(model, signature)
        assert str(there.graph) == str(here.graph)
        assert [node.meta.get("sizes") for node in there.graph.nodes] == [
            node.meta.get("sizes") for node in here.graph.nodes
        ]


def test_plain_attribute_on_meta() -> None:
    with torch.device("meta"):
        model = Own()
    with pytest.raises(CaptureError, match=r"offset.*register_buffer"):
        _train(model, signature_of(own_batch(3), 3))


def test_to_device() -> None:
    graph = _train(_own(), own_batch(3))
    moved = graph.to_device("meta")
    devices = lambda g: {str(n.kwargs["device"]) for n in nodes_with_subgraphs(g) if "device" in n.kwargs}  # noqa: E731
    assert devices(graph) == {"cpu"}
    assert devices(moved) == {"meta"}
    assert moved.constants["offset"].is_meta
    assert str(moved.to_device("meta").graph) == str(moved.graph)


# --- the model stays as it was --------------------------------------------------------------


def _state(model: nn.Module) -> list[Any]:
    registered = [(name, id(value)) for name, value in [*model.named_parameters(), *model.named_buffers()]]
    return [
        registered,
        [module.training for module in model.modules()],
        [sorted(vars(m)) for m in model.modules()],
    ]


@pytest.mark.parametrize("training", [True, False])
def test_model_is_unchanged(training: bool) -> None:
    model = _own()
    model.blocks[0].eval()
    batch = own_batch(3)
    before, random = _state(model), torch.get_rng_state()
    values = {name: value.clone() for name, value in model.state_dict().items()}
    graph = capture(model, batch, training=training, autocast=None)
    assert _state(model) == before
    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(value, values[name]) for name, value in model.state_dict().items())
    norms = [node.args[5] for node in graph.graph.nodes if "batch_norm" in str(node.target)]
    assert norms == ([False, True] if training else [False, False])


def test_model_is_unchanged_after_an_error() -> None:
    model = _own()
    before = _state(model)
    with pytest.raises(CaptureError):
        _train(model, {"x": torch.zeros(3, dtype=torch.int64), "y": torch.zeros(3, 2, 2, dtype=torch.int64)})
    assert _state(model) == before


def test_eval_capture_gives_the_eval_loss() -> None:
    model = _own()
    graph = capture(model, own_batch(3), training=False, autocast=None)
    batch = own_batch(5)
    with torch.no_grad():
        (got,) = executable(graph, model)(batch["x"], batch["y"])
        assert torch.equal(got, model.eval()(**batch))


# --- the number of samples ------------------------------------------------------------------


class FixedBatch(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x).reshape(3, -1).mean(dim=1).square().mean() * int(x.shape[0])


def test_a_fixed_number_of_samples() -> None:
    model = FixedBatch()
    graph = _train(model, torch.randn(6, 4))
    assert not graph.dynamic_batch
    assert graph.example_batch_size == 6
    assert "reshape(3, -1)" in graph.static_reason
    assert_same_gradients(model, graph, torch.randn(6, 4))
    assert (
        capture(
            model, signature_of(torch.randn(3, 4)), training=True, autocast=None, num_samples=9
        ).example_batch_size
        == 9
    )


def test_no_batch_dimension_at_all() -> None:
    class Scalar(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(()))

        def forward(self, x: Tensor) -> Tensor:
            return self.weight * x

    graph = _train(Scalar(), torch.tensor(2.0))
    assert not graph.dynamic_batch


# --- losses ---------------------------------------------------------------------------------


@dataclass
class Output:
    loss: Tensor
    logits: Tensor


class Returns(nn.Module):
    def __init__(self, make: Callable[[Tensor, Tensor], Any]) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 2)
        self.make = make

    def forward(self, x: Tensor) -> Any:
        return self.make(self.linear(x), x)


@pytest.mark.parametrize(
    ("make", "weight"),
    [
        (lambda h, x: h.mean(), 5.0),
        (lambda h, x: h.mean().reshape(1), 5.0),
        (lambda h, x: {"loss": h.mean(), "logits": h}, 5.0),
        (lambda h, x: Output(h.mean(), h), 5.0),
        (lambda h, x: Loss(sum=h.sum(), weight=3.0), 3.0),
        (lambda h, x: Loss(sum=h.sum(), weight=h.shape[0] * 2), 10.0),
        (lambda h, x: Loss(sum=h.sum(), weight=(x > -100).sum()), 20.0),
    ],
)
def test_forms_of_loss(make: Callable[[Tensor, Tensor], Any], weight: float) -> None:
    model = Returns(make)
    x = torch.randn(5, 4)
    graph = _train(model, torch.randn(3, 4))
    parts = loss_of(graph.output_spec, executable(graph, model)(x), 5)
    assert parts.weight == weight
    assert parts.sum.shape == ()
    want = model(x)
    if isinstance(want, Loss):
        assert torch.equal(parts.sum, want.sum)
    else:
        assert torch.allclose(parts.sum, model.linear(x).mean() * 5)
    parts.sum.backward()
    assert model.linear.weight.grad is not None


@pytest.mark.parametrize(
    ("make", "words"),
    [
        (lambda h, x: h, r"has shape \(batch, 2\)"),
        (lambda h, x: {"logits": h}, r"dict\(logits: Tensor\(batch, 2\) of float32\)"),
        (lambda h, x: (h.mean(), h), r"tuple\(Tensor\(\) of float32, Tensor"),
        (lambda h, x: None, "None"),
        (lambda h, x: h.detach().mean(), "does not depend on any trainable parameter"),
        (lambda h, x: Loss(sum=h, weight=1), r"sum .*shape \(batch, 2\)"),
        (lambda h, x: torch.complex(h, h).mean(), r"complex \(Tensor\(\) of complex64\)"),
        (lambda h, x: Loss(sum=1.0, weight=1), "must be a tensor"),  # type: ignore[arg-type]
        (lambda h, x: Loss(sum=h.sum(), weight="1"), "must be a number"),  # type: ignore[arg-type]
    ],
)
def test_no_loss(make: Callable[[Tensor, Tensor], Any], words: str) -> None:
    with pytest.raises(LossError, match=words):
        _train(Returns(make), torch.randn(3, 4))


def test_loss_with_more_than_one_element_at_run_time() -> None:
    with pytest.raises(LossError, match=r"\(2,\)"):
        loss_of(_train(Returns(lambda h, x: h.mean()), torch.randn(3, 4)).output_spec, [torch.ones(2)], 2)


# --- what stops capture ---------------------------------------------------------------------


class Decides(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.linear(x)
        if h.sum() > 0:  # the line
            h = -h
        return h.mean()


@contextlib.contextmanager
def _nothing_printed(capfd: pytest.CaptureFixture[str]) -> Iterator[None]:
    capfd.readouterr()
    yield
    assert capfd.readouterr() == ("", "")


def test_the_root_decides_by_values(capfd: pytest.CaptureFixture[str]) -> None:
    with _nothing_printed(capfd), pytest.raises(CaptureError) as caught:
        _train(Decides(), torch.randn(3, 4))
    message = str(caught.value)
    assert "test_capture.py:" in message
    assert "`if h.sum() > 0:  # the line`" in message
    assert "(1)" in message
    assert "(2)" in message
    assert "(3)" in message


def test_whisper_that_drops_layers() -> None:
    model, batch = whisper(layerdrop=0.5)
    with pytest.raises(CaptureError, match=r"layerdrop is 0\.5.*set it to 0"):
        _train(model.train(), batch(3))


def test_an_error_of_the_model_itself_names_its_line() -> None:
    model = _own()
    bad = {
        "x": torch.zeros(3, dtype=torch.int64),
        "y": torch.zeros(3, dtype=torch.int64),
        "mask": torch.ones(5, 3),
    }
    with pytest.raises(CaptureError, match=r"capture_models\.py:\d+: `h = h \* mask\[:, None\]`"):
        _train(model, bad)


def test_missing_argument() -> None:
    with pytest.raises(DataError, match=r"does not fit .*: missing a required argument: 'y'\. The batch has"):
        _train(_own(), {"x": torch.zeros(3, dtype=torch.int64)})


def test_bad_batch() -> None:
    with pytest.raises(DataError):
        _train(_own(), [object()])


def test_vocabulary_is_respected() -> None:
    assert own_batch(4)["x"].max() < VOCABULARY
