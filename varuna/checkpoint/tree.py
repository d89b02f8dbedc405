"""Nested state as JSON plus tensors, and back: what ``state_dict()`` of schedulers and user objects returns.

Values come back equal and of the same type. What JSON has no form for becomes ``{"$": kind, ...}``; a tensor
becomes a reference by name. Anything that only pickle could restore (functions, objects of classes) is refused
with the path to it. Nothing here runs code that a file names.
"""

from __future__ import annotations

import base64
import math
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from varuna.checkpoint.errors import DamagedCheckpoint, StateError
from varuna.checkpoint.layout import ELEMENT_TYPES
from varuna.checkpoint.values import Json

_KIND = "$"
_DTYPES = frozenset(getattr(torch, name) for name in ELEMENT_TYPES)
_MAX_JSON_INTEGER = 2**63 - 1
_FACTORIES: dict[str, Callable[[], Any]] = {
    "list": list,
    "dict": dict,
    "set": set,
    "int": int,
    "float": float,
}


@dataclass(kw_only=True)
class Flat:
    """State taken apart.

    Attributes:
        json: everything but the tensors, with references to them.
        tensors: by name; the tensors themselves, not copies.
    """

    json: Json = None
    tensors: dict[str, Tensor] = field(default_factory=dict)


def flatten(value: Any, name: Callable[..., str], where: str) -> Flat:
    """Take state apart.

    Args:
        value: anything made of None, numbers, text, bytes, tensors, NumPy values, and containers of them.
        name: ``name(index)`` is the name under which the index-th tensor is stored.
        where: what the value is, for messages.

    Raises:
        StateError: something in it has no stored form; the message has the path to it.
    """
    flat = Flat()
    flat.json = _Encoder(flat.tensors, name).encode(value, where)
    return flat


def unflatten(raw: Json, tensors: Mapping[str, Tensor], where: str) -> Any:
    """Put together what ``flatten`` took apart.

    Args:
        raw: its ``json``.
        tensors: its tensors by name.
        where: what the value is, for messages.

    Raises:
        DamagedCheckpoint: it is something else, or a tensor is missing.
    """
    try:
        return _decode(raw, tensors)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise DamagedCheckpoint(f"The stored state of {where} cannot be read: {error!r}.") from error


def tensor_names(raw: Json) -> tuple[str, ...]:
    """Names of the tensors that ``unflatten`` will ask for."""
    if isinstance(raw, list):
        return tuple(name for item in raw for name in tensor_names(item))
    if not isinstance(raw, dict):
        return ()
    if raw.get(_KIND) in ("tensor", "array"):
        return (raw["name"],)
    return tuple(name for item in raw.values() for name in tensor_names(item))


# --- taking apart ---------------------------------------------------------------------------


class _Encoder:
    def __init__(self, tensors: dict[str, Tensor], name: Callable[..., str]) -> None:
        self._tensors = tensors
        self._name = name
        self._inside: list[int] = []

    def encode(self, value: Any, path: str) -> Json:
        if value is None or type(value) in (bool, str):
            return value
        if type(value) is int:
            fits = -_MAX_JSON_INTEGER <= value <= _MAX_JSON_INTEGER
            return value if fits else {_KIND: "int", "value": str(value)}
        if type(value) is float:
            return value if math.isfinite(value) else {_KIND: "float", "value": repr(value)}
        if isinstance(value, Tensor):
            return {_KIND: "tensor", "name": self._add(value, path)}
        if isinstance(value, np.ndarray | np.generic):
            return self._numpy(value, path)
        simple = _simple(value)
        if simple is not None:
            return simple
        if id(value) in self._inside:
            raise StateError(
                f"{path} contains itself, which cannot be stored. Store a copy of the part needed."
            )
        self._inside.append(id(value))
        try:
            return self._container(value, path)
        finally:
            self._inside.pop()

    def _container(self, value: Any, path: str) -> Json:
        kind = type(value)
        if kind is list:
            return self._items(value, path)
        if kind is dict:
            if all(type(key) is str for key in value) and _KIND not in value:
                return {key: self.encode(item, f"{path}[{key!r}]") for key, item in value.items()}
            return {_KIND: "dict", "items": self._pairs(value, path)}
        if kind is tuple:
            return {_KIND: "tuple", "items": self._items(value, path)}
        if kind is set or kind is frozenset:
            return {_KIND: kind.__name__, "items": self._items(sorted(value, key=repr), path)}
        if kind is OrderedDict or kind is Counter:
            return {_KIND: kind.__name__, "items": self._pairs(value, path)}
        if kind is defaultdict and _factory_name(value) is not None:
            return {_KIND: "defaultdict", "of": _factory_name(value), "items": self._pairs(value, path)}
        if kind is deque:
            return {_KIND: "deque", "maxlen": value.maxlen, "items": self._items(value, path)}
        if kind is torch.Size:
            return {_KIND: "size", "items": list(value)}
        raise StateError(
            f"{path} is a {kind.__module__}.{kind.__qualname__} ({value!r:.60}), which only pickle could "
            f"store, and checkpoints hold no pickle. Let state_dict() return numbers, text, bytes, tensors, "
            f"NumPy arrays and lists, tuples or dicts of them, and let load_state_dict() make the object from "
            f"them."
        )

    def _items(self, value: Any, path: str) -> list[Json]:
        return [self.encode(item, f"{path}[{index}]") for index, item in enumerate(value)]

    def _pairs(self, value: Mapping[Any, Any], path: str) -> list[Json]:
        return [
            [self.encode(key, f"a key of {path}"), self.encode(item, f"{path}[{key!r}]")]
            for key, item in value.items()
        ]

    def _numpy(self, value: Any, path: str) -> Json:
        if value.dtype.kind not in "biufc" or type(value) not in (np.ndarray, type(value[()])):
            raise StateError(f"{path} is a NumPy value of type {value.dtype}, which only pickle could store.")
        if isinstance(value, np.generic):
            data = base64.b64encode(value.tobytes()).decode()
            return {_KIND: "numpy", "dtype": value.dtype.str, "data": data}
        native = np.ascontiguousarray(value).astype(value.dtype.newbyteorder("="), copy=False)
        if native.dtype.name not in ELEMENT_TYPES:  # long double, say
            raise StateError(f"{path} is a NumPy array of type {value.dtype}, which cannot be stored.")
        native = native.reshape(value.shape)
        if not native.flags.writeable:
            native = native.copy()
        return {_KIND: "array", "name": self._add(torch.from_numpy(native), path)}

    def _add(self, tensor: Tensor, path: str) -> str:
        check_tensor(tensor, path)
        name = self._name(str(len(self._tensors)))
        self._tensors[name] = tensor.detach()
        return name


def check_tensor(tensor: Tensor, path: str) -> None:
    """Raise ``StateError`` if a tensor's values cannot be stored as bytes."""
    if is_storable(tensor):
        return
    if tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        raise StateError(
            f"{path} is a tensor of {tensor.dtype}, layout {tensor.layout}, on {tensor.device}: a checkpoint "
            f"holds dense tensors with values. Store tensor.to_dense(), or leave it out of the state."
        )
    raise StateError(f"{path} is a tensor of {tensor.dtype}, which a checkpoint cannot hold.")


def is_storable(tensor: Tensor) -> bool:
    """Whether a tensor's values can be stored as bytes."""
    return tensor.layout is torch.strided and tensor.dtype in _DTYPES and not tensor.is_meta


def _simple(value: Any) -> Json:
    """Values without parts; None if it is something else."""
    if type(value) is bytes:
        return {_KIND: "bytes", "data": base64.b64encode(value).decode()}
    if type(value) is complex:
        return {_KIND: "complex", "value": [repr(value.real), repr(value.imag)]}
    if isinstance(value, torch.dtype):
        return {_KIND: "dtype", "value": str(value).removeprefix("torch.")}
    if isinstance(value, torch.device):
        return {_KIND: "device", "value": str(value)}
    return None


def _factory_name(value: defaultdict[Any, Any]) -> str | None:
    return next((name for name, factory in _FACTORIES.items() if factory is value.default_factory), None)


# --- putting together -----------------------------------------------------------------------


def _decode(raw: Json, tensors: Mapping[str, Tensor]) -> Any:
    if isinstance(raw, list):
        return [_decode(item, tensors) for item in raw]
    if not isinstance(raw, dict):
        return raw
    if _KIND not in raw:
        return {key: _decode(item, tensors) for key, item in raw.items()}
    return _DECODE[raw[_KIND]](raw, tensors)


def _list(raw: Json, tensors: Mapping[str, Tensor]) -> list[Any]:
    return [_decode(item, tensors) for item in raw["items"]]


def _pairs(raw: Json, tensors: Mapping[str, Tensor]) -> list[Any]:
    return [(_decode(key, tensors), _decode(item, tensors)) for key, item in raw["items"]]


def _numpy_scalar(raw: Json) -> Any:
    dtype = np.dtype(raw["dtype"])
    if dtype.kind not in "biufc":
        raise ValueError(f"NumPy type {raw['dtype']}")
    return np.frombuffer(base64.b64decode(raw["data"]), dtype=dtype)[0]


def _dtype(raw: Json) -> torch.dtype:
    found = getattr(torch, raw["value"], None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"torch.{raw['value']} is not a dtype")
    return found


_DECODE: dict[str, Callable[[Json, Mapping[str, Tensor]], Any]] = {
    "int": lambda raw, tensors: int(raw["value"]),
    "float": lambda raw, tensors: float(raw["value"]),
    "bytes": lambda raw, tensors: base64.b64decode(raw["data"]),
    "complex": lambda raw, tensors: complex(*map(float, raw["value"])),
    "dtype": lambda raw, tensors: _dtype(raw),
    "device": lambda raw, tensors: torch.device(raw["value"]),
    "size": lambda raw, tensors: torch.Size(raw["items"]),
    "numpy": lambda raw, tensors: _numpy_scalar(raw),
    "tensor": lambda raw, tensors: tensors[raw["name"]],
    "array": lambda raw, tensors: tensors[raw["name"]].numpy(),
    "dict": lambda raw, tensors: dict(_pairs(raw, tensors)),
    "tuple": lambda raw, tensors: tuple(_list(raw, tensors)),
    "set": lambda raw, tensors: set(_list(raw, tensors)),
    "frozenset": lambda raw, tensors: frozenset(_list(raw, tensors)),
    "OrderedDict": lambda raw, tensors: OrderedDict(_pairs(raw, tensors)),
    "Counter": lambda raw, tensors: Counter(dict(_pairs(raw, tensors))),
    "defaultdict": lambda raw, tensors: defaultdict(_FACTORIES[raw["of"]], _pairs(raw, tensors)),
    "deque": lambda raw, tensors: deque(_list(raw, tensors), maxlen=raw["maxlen"]),
}
