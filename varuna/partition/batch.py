"""A batch as tensors by name, and back: any nesting of containers over tensors and constants.

Containers are mappings, lists, tuples, named tuples and dataclasses; constants are None, bool, int, float and
str. Every tensor is named by its path (``"input_ids"``, ``"0"``, ``"labels.x"``).

At the top level a mapping means ``forward(**batch)``, a list or tuple ``forward(*batch)``, anything else
``forward(batch)``. Inside, every mapping is rebuilt as a plain dict; named tuples and dataclasses as their own
class.
"""

from __future__ import annotations

import dataclasses
import inspect
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from varuna.errors import DataError

Constant = None | bool | int | float | str

_CONSTANT_TYPES = (type(None), bool, int, float, str)


@dataclass(frozen=True, kw_only=True)
class Node:
    """One node of a batch's tree.

    Attributes:
        kind: tensor, constant, mapping, list, tuple, namedtuple or dataclass.
        key: path of a tensor, else empty.
        names: keys of a mapping, fields of a dataclass or named tuple; matched with ``children``.
        children: the nodes inside.
        type_name: ``module:qualname`` for a named tuple or dataclass; the type's name for a constant.
        text: a constant's value as text.
    """

    kind: str
    key: str = ""
    names: tuple[str, ...] = ()
    children: tuple[Node, ...] = ()
    type_name: str = ""
    text: str = ""


@dataclass(frozen=True)
class FlatBatch:
    """A batch by key. ``constants`` has the non-tensors; both are in the batch's own order."""

    tensors: dict[str, Tensor]
    constants: dict[str, Constant]
    tree: Node


def flatten_batch(batch: object) -> FlatBatch:
    """Names every tensor of a batch by its path.

    Raises:
        DataError: no tensor in it, something that is neither a container, a tensor nor a constant, or two equal
            paths.
    """
    tensors: dict[str, Tensor] = {}
    constants: dict[str, Constant] = {}
    tree = _flatten(batch, "", tensors, constants)
    if not tensors:
        raise DataError(
            f"The batch ({type(batch).__name__}) has no tensor in it. The collate function must return "
            f"tensors: a "
            f"tensor, or a dict, list or tuple of them."
        )
    return FlatBatch(tensors=tensors, constants=constants, tree=tree)


def num_samples_of(flat: FlatBatch) -> int:
    """Size of dimension 0 that most tensors have; the first one's on a tie. 1 if all are 0-dimensional."""
    sizes = [tensor.shape[0] for tensor in flat.tensors.values() if tensor.dim() > 0]
    return max(sizes, key=sizes.count) if sizes else 1


def rebuild(tree: Node, tensors: Mapping[str, Any]) -> Any:
    """The batch again, with ``tensors`` (by key) in their places.

    Raises:
        DataError: a named tuple's or dataclass's type is not known in this process.
    """
    if tree.kind == "tensor":
        return tensors[tree.key]
    if tree.kind == "constant":
        return _constant_of(tree)
    children = [rebuild(child, tensors) for child in tree.children]
    if tree.kind == "list":
        return children
    if tree.kind == "tuple":
        return tuple(children)
    by_name = dict(zip(tree.names, children, strict=True))
    if tree.kind == "mapping":
        return by_name
    return _find_type(tree.type_name)(**by_name)


def call_arguments(tree: Node, tensors: Mapping[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments with which ``forward`` is called for this batch."""
    batch = rebuild(tree, tensors)
    if tree.kind == "mapping":
        return (), batch
    if tree.kind in ("list", "tuple", "namedtuple"):
        return tuple(batch), {}
    return (batch,), {}


def check_call(forward: Callable[..., Any], tree: Node) -> None:
    """Raise DataError if ``forward`` does not take the values of such a batch as its arguments."""
    by_name: tuple[str, ...] = tree.names if tree.kind == "mapping" else ()
    num_listed = (
        len(tree.children)
        if tree.kind in ("list", "tuple", "namedtuple")
        else 0
        if tree.kind == "mapping"
        else 1
    )
    taken = inspect.signature(forward)
    try:
        taken.bind(*([None] * num_listed), **dict.fromkeys(by_name))
    except TypeError as error:
        values = "1 value" if num_listed == 1 else f"{num_listed} values"
        given = f"{values}, given by position" if num_listed else f"the keys {', '.join(by_name)}"
        raise DataError(
            f"The batch does not fit the model, whose forward takes {taken}: {error}. The batch has {given}. "
            f"Let the dataset or collate_fn return what forward takes, or give loss_fn if forward takes only "
            f"a part."
        ) from None


def node_from_json(raw: Mapping[str, Any]) -> Node:
    """The node that ``dataclasses.asdict`` wrote."""
    return Node(
        kind=raw["kind"],
        key=raw["key"],
        names=tuple(raw["names"]),
        children=tuple(node_from_json(child) for child in raw["children"]),
        type_name=raw["type_name"],
        text=raw["text"],
    )


# --- inside ---------------------------------------------------------------------------------


def _flatten(value: object, path: str, tensors: dict[str, Tensor], constants: dict[str, Constant]) -> Node:
    if isinstance(value, Tensor):
        _add(tensors, path or "0", value)
        return Node(kind="tensor", key=path or "0")
    if isinstance(value, _CONSTANT_TYPES):
        _add(constants, path or "0", value)
        return Node(kind="constant", type_name=_constant_type(value), text=_constant_text(value))
    kind, type_name, names, children = _open(value, path)
    inner = tuple(
        _flatten(child, f"{path}.{name}" if path else name, tensors, constants)
        for name, child in zip(names, children, strict=True)
    )
    kept_names = () if kind in ("list", "tuple") else tuple(names)
    return Node(kind=kind, type_name=type_name, names=kept_names, children=inner)


class _Opened(NamedTuple):
    kind: str
    type_name: str
    names: list[str]
    children: list[Any]


def _open(value: object, path: str) -> _Opened:
    if isinstance(value, Mapping):
        if not all(isinstance(name, str) for name in value):
            raise DataError(
                f"A mapping in the batch at {path or 'the top'} has keys that are not text: {list(value)!r}."
            )
        return _Opened("mapping", "", list(value), list(value.values()))
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        return _Opened("namedtuple", _type_name(type(value)), list(value._fields), list(value))
    if isinstance(value, (list, tuple)):
        kind = "list" if isinstance(value, list) else "tuple"
        return _Opened(kind, "", [str(index) for index in range(len(value))], list(value))
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value) if field.init]
        return _Opened("dataclass", _type_name(type(value)), names, [getattr(value, name) for name in names])
    raise DataError(
        f"The batch holds a {type(value).__name__} at {path or 'the top'}. A batch may hold tensors, None, "
        f"bool, int, "
        f"float, str, and dicts, lists, tuples, named tuples or dataclasses of them. Convert it in the "
        f"collate function."
    )


def _add(target: dict[str, Any], key: str, value: object) -> None:
    if key in target:
        raise DataError(f"Two values of the batch have the same path {key!r}. Rename one of them.")
    target[key] = value


def _constant_text(value: Constant) -> str:
    if isinstance(value, float):
        return float(value).hex()
    if isinstance(value, str):
        return str(value)
    return repr(value)


_READ_CONSTANT: dict[str, Callable[[str], Constant]] = {
    "NoneType": lambda text: None,
    "bool": lambda text: text == "True",
    "int": int,
    "float": float.fromhex,
    "str": str,
}


def _constant_type(value: Constant) -> str:
    return next(kind.__name__ for kind in _CONSTANT_TYPES if isinstance(value, kind))


def _constant_of(node: Node) -> Constant:
    return _READ_CONSTANT[node.type_name](node.text)


def _type_name(kind: type) -> str:
    return f"{kind.__module__}:{kind.__qualname__}"


def _find_type(type_name: str) -> Callable[..., Any]:
    module_name, _, path = type_name.partition(":")
    found: Any = sys.modules.get(module_name)
    for part in path.split("."):
        found = getattr(found, part, None)
    if not isinstance(found, type):
        raise DataError(
            f"The batch holds a {path} of module {module_name}, which this process has not imported or which "
            f"is defined "
            f"inside a function. Define the class at the top level of a module."
        )
    return found
