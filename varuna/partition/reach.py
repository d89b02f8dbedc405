"""What a user's function or class refers to beside its own source: globals by name, members of classes."""

from __future__ import annotations

import inspect
import types
from collections.abc import Iterator
from typing import Any

from varuna.partition.sources import UnkeyableError, is_users, source_path

_OF_EVERY_CLASS = frozenset(
    {
        "__annotations__",
        "__annotations_cache__",
        "__annotate_func__",
        "__dict__",
        "__doc__",
        "__firstlineno__",
        "__module__",
        "__qualname__",
        "__static_attributes__",
        "__weakref__",
        "__abstractmethods__",
        "_abc_impl",
        "__orig_bases__",
        "__parameters__",
        "__slots__",
        "__match_args__",
        "__dataclass_fields__",
        "__dataclass_params__",
        "__type_params__",
    }
)

_OUTSIDE = frozenset({"environ", "getenv", "open", "read_text", "read_bytes"})
"""Names by which code reads what lies outside of the process: it may differ at the next start."""

_SLOTS = (types.MemberDescriptorType, types.GetSetDescriptorType)


def globals_of(function: types.FunctionType) -> dict[str, Any]:
    """Values of the globals that a function's code mentions; of a user's module, the attributes it mentions.

    Modules that are not the user's are left out: their source or version is known.

    Raises:
        UnkeyableError: the code reads the environment or files.
    """
    names = sorted(set(_names(function.__code__)))
    if _OUTSIDE & set(names):
        raise UnkeyableError
    found: dict[str, Any] = {}
    for name in names:
        if name not in function.__globals__:
            continue
        value = function.__globals__[name]
        if not isinstance(value, types.ModuleType):
            found[name] = value
            continue
        path = source_path(value)
        if path is not None and is_users(path):
            found.update({f"{name}.{inner}": vars(value)[inner] for inner in names if inner in vars(value)})
    return found


def code_of(code: types.CodeType) -> list[Any]:
    """What a function's code does, apart from its source: two lambdas of one line differ here."""
    constants = [
        code_of(constant) if isinstance(constant, types.CodeType) else repr(constant)
        for constant in code.co_consts
        if not isinstance(constant, frozenset)  # their order differs between processes
    ]
    return [code.co_code.hex(), list(code.co_names), constants]


def members_of_class(kind: type) -> Iterator[tuple[str, Any]]:
    """The functions and values in a class's own body, as they are now."""
    for name, value in sorted(vars(kind).items()):
        if name in _OF_EVERY_CLASS or isinstance(value, _SLOTS) or _is_generated(kind, value):
            continue
        if isinstance(value, (staticmethod, classmethod)):
            yield name, value.__func__
        elif isinstance(value, property):
            for part in (value.fget, value.fset):
                if part is not None:
                    yield name, part
        else:
            yield name, value


def _is_generated(kind: type, value: Any) -> bool:
    """Methods that dataclasses, named tuples and attrs write from the class's own source."""
    function = value.__func__ if isinstance(value, (staticmethod, classmethod)) else value
    code = getattr(inspect.unwrap(function) if callable(function) else function, "__code__", None)
    makers = ("__dataclass_fields__", "_fields", "__attrs_attrs__")
    return code is not None and code.co_filename.startswith("<") and any(hasattr(kind, m) for m in makers)


def _names(code: types.CodeType) -> Iterator[str]:
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
