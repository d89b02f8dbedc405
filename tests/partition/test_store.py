"""Captured graphs survive a directory; keys are the same in every process and follow whatever matters."""

import functools
import json
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, fx, nn

from tests.partition.capture_models import MODELS, Own, assert_same_gradients, own_batch
from tests.partition.test_leaf import Model as WithLeaves
from varuna.partition.capture import capture
from varuna.partition.graph import CapturedGraph, nodes_with_subgraphs
from varuna.partition.loss import Loss
from varuna.partition.signature import signature_of
from varuna.partition.store import StoreError, capture_key, load_graph, save_graph
from varuna.run.precision import AutocastSpec


def _text(graph: CapturedGraph) -> list[str]:
    """Everything in a graph as text."""
    nodes = [
        f"{node.op} {node.name} {node.target} {node.args} {node.kwargs} "
        + " ".join(
            f"{key}={node.meta.get(key)}" for key in ("input_key", "val", "sizes", "module_path", "stack_trace")
        )
        for node in nodes_with_subgraphs(graph)
    ]
    fields = replace(graph, graph=fx.Graph(), constants={}, subgraphs={})
    return [*nodes, str(fields).partition("input_keys")[2]]


class Everything(nn.Module):
    """Autocast regions, special floats, slices, dtypes, a weight computed from sizes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset = torch.arange(4.0)

    def forward(self, x: Tensor, scale: float = 1.0) -> Loss:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = self.linear(x + self.offset)
        h = h.float().masked_fill(h > 100, float("inf"))[:, 1:3].to(torch.float64) * scale
        return Loss(sum=h.sum() + torch.zeros(2, dtype=torch.float32).sum(), weight=x.shape[0] * 2)


def _models() -> dict[str, Callable[[], tuple[nn.Module, Any]]]:
    found: dict[str, Callable[[], tuple[nn.Module, Any]]] = {
        "own": lambda: (Own(), own_batch(3)),
        "leaves": lambda: (WithLeaves(), torch.randn(3, 4)),
        "everything": lambda: (Everything(), {"x": torch.randn(3, 4), "scale": 0.1}),
    }
    for name in ("gpt2", "whisper", "mixtral-grouped"):
        found[name] = functools.partial(_hugging_face, name)
    return found


def _hugging_face(name: str) -> tuple[nn.Module, Any]:
    model, batch = MODELS[name]()
    return model.train(), batch(3)


@pytest.mark.parametrize("name", _models())
def test_round_trip(name: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model, batch = _models()[name]()
    graph = capture(model, batch, training=True, autocast=None)
    save_graph(graph, tmp_path / "graphs" / "one")
    loaded = load_graph(tmp_path / "graphs" / "one")
    assert _text(loaded) == _text(graph)
    assert loaded.constants.keys() == graph.constants.keys()
    assert all(torch.equal(loaded.constants[key], graph.constants[key]) for key in graph.constants)
    assert [path.name for path in (tmp_path / "graphs").iterdir()] == ["one"]
    assert_same_gradients(model, loaded, batch, bound=0.0 if "mixtral" not in name else 2e-6)


def _small() -> CapturedGraph:
    return capture(Everything(), torch.randn(3, 4), training=True, autocast=None)


def test_several_writers(tmp_path: Path) -> None:
    graph = _small()
    start = threading.Barrier(4)
    errors: list[Exception] = []

    def write() -> None:
        start.wait()
        try:
            for index in range(5):
                save_graph(graph, tmp_path / str(index))
        except Exception as error:
            errors.append(error)

    threads = [threading.Thread(target=write) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert errors == []
    assert sorted(path.name for path in tmp_path.iterdir()) == [str(index) for index in range(5)]
    assert all(_text(load_graph(path)) == _text(graph) for path in tmp_path.iterdir())


def test_nothing_is_left_behind_by_a_failure(tmp_path: Path) -> None:
    graph = _small()
    node = next(node for node in graph.graph.nodes if node.op == "call_function")
    node.kwargs = {**node.kwargs, "unknown": object()}
    with pytest.raises(StoreError, match="object"):
        save_graph(graph, tmp_path / "one")
    assert list(tmp_path.iterdir()) == []


def _edit(path: Path, old: str, new: str) -> None:
    text = (path / "graph.json").read_text()
    assert old in text
    (path / "graph.json").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda path: _edit(path, '"format": 1', '"format": 0'), "format 0"),
        (lambda path: (path / "graph.json").write_text("{"), "damaged"),
        (lambda path: (path / "graph.json").write_text("{}"), "damaged"),
        (lambda path: (path / "constants.safetensors").write_bytes(b"123"), "damaged"),
        (lambda path: _edit(path, "op:aten.linear.default", "op:os.system"), "does not have"),
        (lambda path: _edit(path, "op:aten.linear.default", "function:os.system"), "does not have"),
        (lambda path: _edit(path, '"torch": "float64"', '"torch": "load"'), "not a dtype"),
        (lambda path: _edit(path, '{"node": "linear"}', '{"node": "nowhere"}'), "damaged"),
    ],
)
def test_damaged(tmp_path: Path, damage: Callable[[Path], Any], words: str) -> None:
    save_graph(_small(), tmp_path / "one")
    damage(tmp_path / "one")
    with pytest.raises(StoreError, match=words):
        load_graph(tmp_path / "one")


def test_missing(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_graph(tmp_path / "none")


def test_no_pickle(tmp_path: Path) -> None:
    save_graph(_small(), tmp_path / "one")
    assert sorted(path.name for path in (tmp_path / "one").iterdir()) == ["constants.safetensors", "graph.json"]
    json.loads((tmp_path / "one" / "graph.json").read_text())


# --- keys -----------------------------------------------------------------------------------

SIGNATURE = signature_of(own_batch(3), 3)


def _key(model: nn.Module, **changes: Any) -> str | None:
    given = {"signature": SIGNATURE, "training": True, "autocast": None, **changes}
    return capture_key(model, **given)


def test_weights_and_place_do_not_matter() -> None:
    with torch.device("meta"):
        empty = Own()
    empty.offset = torch.arange(8.0)
    assert _key(Own()) == _key(Own()) == _key(empty)
    assert _key(Own()) is not None


def test_capturing_does_not_change_the_key() -> None:
    model = Own()
    before = _key(model)
    capture(model, own_batch(3), training=True, autocast=None)
    assert _key(model) == before


def _change(name: str) -> nn.Module:
    model = Own(dropout=0.2) if name == "dropout" else Own(width=9) if name == "shape" else Own()
    if name == "tie":
        model.head.weight = nn.Parameter(model.head.weight.detach().clone())
    elif name == "frozen":
        model.head.weight.requires_grad_(False)
    elif name == "constant":
        model.offset = model.offset + 1
    elif name == "attribute":
        model.blocks[1].more = {"a": [1, 2.0, None]}
    elif name == "mode":
        model.blocks[0].norm.eval()
    elif name == "hook":
        model.blocks[0].register_forward_hook(_hook)
    elif name == "other module":
        model.blocks[0].dropout = nn.Identity()
    elif name == "dtype":
        model.double()
    return model


def _hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
    return output * 2


CHANGES = [
    "dropout",
    "shape",
    "tie",
    "frozen",
    "constant",
    "attribute",
    "mode",
    "hook",
    "other module",
    "dtype",
]


def test_whatever_matters_changes_the_key() -> None:
    keys = [_key(Own()), *(_key(_change(name)) for name in CHANGES)]
    keys.append(_key(Own(), training=False))
    keys.append(_key(Own(), autocast=AutocastSpec(device_type="cpu", dtype=torch.bfloat16)))
    keys.append(_key(Own(), signature=signature_of(torch.zeros(3))))
    keys.append(_key(Own(), extra=("blocks.0",)))
    assert None not in keys
    assert len(set(keys)) == len(keys)


@pytest.mark.parametrize("thing", [threading.Lock(), object(), (item for item in ()), eval("lambda: 0")])
def test_what_cannot_be_described_has_no_key(thing: object) -> None:
    model = Own()
    model.thing = thing
    assert _key(model) is None


def test_objects_that_refer_to_one_another() -> None:
    model = Own()
    model.config = {"self": [model], "again": {}}
    model.config["again"]["loop"] = model.config
    assert _key(model) is not None


SCRIPT = """
import torch
from helper import Net
from varuna.partition.signature import signature_of
from varuna.partition.store import capture_key
print(capture_key(Net(), signature_of(torch.zeros(2, 3)), True, None))
"""

HELPER = """
from torch import nn
import deeper
class Net(nn.Module):
    names = {"b", "a", "c"}
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(3, 3)
        self.tags = {"x", "y", "z"}
        self.scale = deeper.scale
    def forward(self, x):
        return self.scale(self.linear(x)).mean()
"""


def _key_in_a_process(folder: Path, seed: str) -> str:
    environment = {"PYTHONHASHSEED": seed, "PYTHONPATH": f"{folder}:{Path(__file__).parents[2]}", "PATH": ""}
    done = subprocess.run(
        [sys.executable, "script.py"], cwd=folder, env=environment, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def test_same_key_in_every_process_and_another_after_an_edit(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "helper.py").write_text(HELPER)
    (tmp_path / "deeper.py").write_text("def scale(x):\n    return x * 2\n")
    first = _key_in_a_process(tmp_path, "1")
    assert len(first) == 64
    assert _key_in_a_process(tmp_path, "2") == first
    (tmp_path / "deeper.py").write_text("def scale(x):\n    return x * 3\n")
    assert _key_in_a_process(tmp_path, "1") != first


def test_hugging_face_models_have_keys() -> None:
    for name in MODELS:
        model, batch = MODELS[name]()
        signature = signature_of(batch(3))
        key = capture_key(model, signature, True, None)
        assert key is not None, name
        assert capture_key(MODELS[name]()[0], signature, True, None) == key, name
