"""Values and operators of a captured graph as JSON and back. Nothing here runs code that a file names.

Operators are looked up by name in ``torch.ops``; plain functions only among those of ``operator`` and ``math``
and torch's functions on symbolic numbers.
"""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, fx

from varuna.errors import CaptureError

Json = Any  # what json.dumps takes


class StoreError(CaptureError):
    """A captured graph cannot be written, or what was read is not one; capture again instead."""


# --- operators ------------------------------------------------------------------------------


@functools.cache
def _functions() -> Mapping[str, Callable[..., Any]]:
    found: dict[str, Callable[..., Any]] = {}
    for module in (operator, math):
        for name in dir(module):
            if callable(getattr(module, name)) and not name.startswith("_"):
                found[f"{module.__name__}.{name}"] = getattr(module, name)
    for name in dir(torch):
        if name.startswith(("sym_", "_sym_")):
            found[f"torch.{name}"] = getattr(torch, name)
    return found


@functools.cache
def _function_names() -> Mapping[Any, str]:
    return {function: name for name, function in _functions().items()}


def encode_target(node: fx.Node) -> str:
    """The target of a node as text."""
    target = node.target
    if isinstance(target, str):
        return target
    if isinstance(target, torch._ops.OpOverload):
        return f"op:{target}"
    if isinstance(target, torch._ops.HigherOrderOperator):
        return f"higher:{target.__name__}"
    name = _function_names().get(target)
    if name is None:
        raise StoreError(f"The graph calls {target!r}, which has no name that could be stored.")
    return f"function:{name}"


def decode_target(op: str, text: str) -> Any:
    """The operator, function or name that ``encode_target`` wrote."""
    if op != "call_function":
        return text
    kind, _, name = text.partition(":")
    if kind == "function" and name in _functions():
        return _functions()[name]
    found: Any = torch.ops
    parts = name.split(".") if kind == "op" else ["higher_order", name]
    for part in parts:
        found = getattr(found, part, None)
    if not isinstance(found, (torch._ops.OpOverload, torch._ops.HigherOrderOperator)):
        raise StoreError(f"The stored graph calls {text!r}, which this process does not have.")
    return found


# --- values ---------------------------------------------------------------------------------


def encode(value: Any) -> Json:
    """An argument or a piece of metadata as JSON; nodes become references by name."""
    if value is None or isinstance(value, (bool, str)):
        return value
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        return {"float": value.hex()}
    if isinstance(value, fx.Node):
        return {"node": value.name}
    if isinstance(value, Tensor):
        return _encode_tensor(value)
    if isinstance(value, list):
        return {"list": [encode(item) for item in value]}
    if isinstance(value, tuple) and not hasattr(value, "_fields"):
        return {"tuple": [encode(item) for item in value]}
    if isinstance(value, dict) and all(isinstance(key, str) for key in value):
        return {"dict": {key: encode(item) for key, item in value.items()}}
    if isinstance(value, slice):
        return {"slice": [encode(item) for item in (value.start, value.stop, value.step)]}
    if isinstance(value, torch.device):
        return {"device": str(value)}
    if isinstance(value, (torch.dtype, torch.layout, torch.memory_format)):
        return {"torch": str(value).removeprefix("torch.")}
    if value is Ellipsis:
        return {"ellipsis": True}
    raise StoreError(f"The graph holds a {type(value).__name__} ({value!r:.80}), which cannot be stored.")


def decode(raw: Json, nodes: Mapping[str, fx.Node]) -> Any:
    """What ``encode`` wrote; ``nodes`` are those that references may name."""
    if not isinstance(raw, dict):
        return raw
    ((kind, inside),) = raw.items()
    return _DECODE[kind](inside, nodes)


def _encode_tensor(value: Tensor) -> Json:
    if not value.is_meta:
        raise StoreError("The graph holds a tensor with values in an unexpected place.")
    return {
        "tensor": {
            "shape": list(value.shape),
            "stride": list(value.stride()),
            "dtype": str(value.dtype).removeprefix("torch."),
            "requires_grad": value.requires_grad,
        }
    }


def _decode_tensor(raw: Json, nodes: Mapping[str, fx.Node]) -> Tensor:
    made = torch.empty_strided(
        raw["shape"], raw["stride"], dtype=_torch_name(raw["dtype"], nodes), device="meta"
    )
    return made.requires_grad_(raw["requires_grad"])


def _torch_name(raw: Json, nodes: Mapping[str, fx.Node]) -> Any:
    found = getattr(torch, raw, None)
    if not isinstance(found, (torch.dtype, torch.layout, torch.memory_format)):
        raise StoreError(f"The stored graph names torch.{raw}, which is not a dtype, layout or memory format.")
    return found


_DECODE: dict[str, Callable[[Json, Mapping[str, fx.Node]], Any]] = {
    "float": lambda raw, nodes: float.fromhex(raw),
    "node": lambda raw, nodes: nodes[raw],
    "tensor": _decode_tensor,
    "list": lambda raw, nodes: [decode(item, nodes) for item in raw],
    "tuple": lambda raw, nodes: tuple(decode(item, nodes) for item in raw),
    "dict": lambda raw, nodes: {key: decode(item, nodes) for key, item in raw.items()},
    "slice": lambda raw, nodes: slice(*(decode(item, nodes) for item in raw)),
    "device": lambda raw, nodes: torch.device(raw),
    "torch": _torch_name,
    "ellipsis": lambda raw, nodes: Ellipsis,
}
