"""A ``CapturedGraph`` as a directory: ``graph.json`` and ``constants.safetensors``. No pickle, no code.

Writing is atomic: a directory of another name is renamed when complete, so that several processes may write the
same graph at the same time and a reader sees a whole one or none.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import fx

from varuna.partition import cutpoint as _cutpoint  # noqa: F401  registers varuna::cut_point
from varuna.partition.encode import Json, StoreError, decode, decode_target, encode, encode_target
from varuna.partition.graph import CapturedGraph
from varuna.partition.key import capture_key
from varuna.partition.loss import OutputSpec
from varuna.partition.signature import InputSignature

__all__ = ["StoreError", "capture_key", "load_graph", "save_graph"]

FORMAT = 1
_GRAPH = "graph.json"
_CONSTANTS = "constants.safetensors"
_STORED_META = ("input_key", "val", "sizes", "module_path", "stack_trace")


def save_graph(graph: CapturedGraph, path: Path) -> None:
    """Writes the graph into the directory ``path``; if it exists already, it stays as it is.

    Raises:
        StoreError: the graph holds something that has no stored form.
        OSError: the disk.
    """
    text = json.dumps(_graph_to_json(graph))
    constants = {name: value.detach().cpu().contiguous().clone() for name, value in graph.constants.items()}
    path.parent.mkdir(parents=True, exist_ok=True)
    unfinished = path.parent / f".{path.name}.{os.getpid()}.{uuid.uuid4().hex[:8]}"
    unfinished.mkdir()
    try:
        (unfinished / _GRAPH).write_text(text, encoding="utf-8")
        save_file(constants, unfinished / _CONSTANTS)
        _rename(unfinished, path)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def load_graph(path: Path) -> CapturedGraph:
    """Reads what ``save_graph`` wrote.

    Raises:
        FileNotFoundError: there is no such directory.
        StoreError: it was written by another version or is damaged.
    """
    text = (path / _GRAPH).read_text(encoding="utf-8")
    try:
        raw = json.loads(text)
        if raw["format"] != FORMAT:
            raise StoreError(
                f"The stored graph {path} has format {raw['format']}, this version reads {FORMAT}."
            )
        constants = load_file(path / _CONSTANTS)
        return CapturedGraph(
            graph=_nodes_from_json(raw["graph"]),
            input_keys=tuple(raw["input_keys"]),
            constants={name: constants[name] for name in raw["constants"]},
            subgraphs={name: _nested_from_json(item) for name, item in raw["subgraphs"].items()},
            output_spec=OutputSpec(form=raw["output_form"], weight=decode(raw["output_weight"], {})),
            signature=InputSignature.from_json(raw["signature"]),
            training=raw["training"],
            dynamic_batch=raw["dynamic_batch"],
            example_batch_size=raw["example_batch_size"],
            static_reason=raw["static_reason"],
            opaque=tuple(raw["opaque"]),
            device=raw["device"],
            aliases=raw["aliases"],
        )
    except (KeyError, TypeError, ValueError, AttributeError, SafetensorError) as error:
        if isinstance(error, StoreError):
            raise
        raise StoreError(f"The stored graph {path} is damaged ({error!r}). Delete the directory.") from error


# --- inside ---------------------------------------------------------------------------------


def _rename(unfinished: Path, path: Path) -> None:
    """Puts the finished directory in its place, unless another process was first."""
    try:
        os.rename(unfinished, path)
    except OSError:
        if not (path / _GRAPH).exists():
            raise


def _graph_to_json(captured: CapturedGraph) -> Json:
    return {
        "format": FORMAT,
        "graph": _nodes_to_json(captured.graph),
        "input_keys": captured.input_keys,
        "constants": list(captured.constants),
        "subgraphs": {name: _nested_to_json(module) for name, module in captured.subgraphs.items()},
        "output_form": captured.output_spec.form,
        "output_weight": encode(captured.output_spec.weight),
        "signature": captured.signature.to_json(),
        "training": captured.training,
        "dynamic_batch": captured.dynamic_batch,
        "example_batch_size": captured.example_batch_size,
        "static_reason": captured.static_reason,
        "opaque": captured.opaque,
        "device": captured.device,
        "aliases": captured.aliases,
    }


def _nodes_to_json(graph: fx.Graph) -> list[Json]:
    return [
        {
            "name": node.name,
            "op": node.op,
            "target": encode_target(node),
            "args": encode(node.args),
            "kwargs": encode(node.kwargs),
            "meta": {key: encode(node.meta[key]) for key in _STORED_META if key in node.meta},
        }
        for node in graph.nodes
    ]


def _nodes_from_json(raw: Sequence[Json]) -> fx.Graph:
    graph = fx.Graph()
    nodes: dict[str, fx.Node] = {}
    for item in raw:
        op, target = item["op"], decode_target(item["op"], item["target"])
        args, kwargs = decode(item["args"], nodes), decode(item["kwargs"], nodes)
        made = graph.create_node(op, target, args, kwargs, item["name"])
        made.meta = {key: decode(value, nodes) for key, value in item["meta"].items()}
        nodes[item["name"]] = made
    graph.lint()
    return graph


def _nested_to_json(module: fx.GraphModule) -> Json:
    children = {name: child for name, child in module.named_children() if isinstance(child, fx.GraphModule)}
    return {
        "graph": _nodes_to_json(module.graph),
        "children": {name: _nested_to_json(child) for name, child in children.items()},
    }


def _nested_from_json(raw: Json) -> fx.GraphModule:
    children: dict[str, Any] = {name: _nested_from_json(item) for name, item in raw["children"].items()}
    return fx.GraphModule(children, _nodes_from_json(raw["graph"]), class_name="Nested")
