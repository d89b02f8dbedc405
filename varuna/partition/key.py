"""The key under which a captured graph is cached: with an equal key, capturing again would give the same graph.

Everything a forward pass may depend on goes into it: the source of the classes, the user's other modules, every
plain attribute of every submodule, shapes and ties of parameters, the batch's signature, modes, precision and
versions. What cannot be described in the same way in every process gives no key at all, and then nothing is
cached.
"""

from __future__ import annotations

import dataclasses
import enum
import functools
import inspect
import json
import logging
import platform
import re
import sys
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from varuna.partition.graph import Autocast
from varuna.partition.reach import code_of, globals_of, members_of_class
from varuna.partition.signature import InputSignature
from varuna.partition.sources import (
    UnkeyableError,
    array_digest,
    file_digest,
    is_compiled,
    is_standard,
    is_users,
    package_versions,
    packages_used,
    source_path,
    tensor_digest,
    text_digest,
)

_MAX_DEPTH = 40
_OWN_SOURCES = Path(__file__).parent
# the files of this package that decide what a captured graph is
_CAPTURING = (
    *("batch", "blame", "capture", "convert", "customgrad", "cutpoint", "encode", "fakes"),
    *(
        "gradmode",
        "graph",
        "key",
        "leaf",
        "leafprobe",
        "loss",
        "nodes",
        "reach",
        "retry",
        "signature",
        "sources",
        "store",
        "watch",
    ),
)
_SKIPPED_ATTRIBUTES = frozenset({"_parameters", "_buffers", "_modules"})  # described by name and shape
_PER_PROCESS_ATTRIBUTES = frozenset({"_original_object_hash"})  # transformers' hash(str) of a generation config
_PLAIN = (type(None), bool, int, str, bytes, complex)
_BY_REPR = (*_PLAIN, torch.dtype, torch.device, torch.layout, torch.memory_format)


def capture_key(
    model: nn.Module,
    signature: InputSignature,
    training: bool,
    autocast: Autocast | None,
    extra: Sequence[str] = (),
) -> str | None:
    """64 hex digits, or None if the model holds something that cannot be described.

    Args:
        model: its values do not matter, only names, shapes, kinds and attributes.
        signature: what the graph is captured for.
        training: train mode or eval mode.
        autocast: the precision it will run under.
        extra: whatever else the result depends on, e.g. opaque paths.
    """
    walk = _Walk()
    try:
        described = [
            _versions(),
            signature.to_json(),
            training,
            repr(autocast),
            next((p.device.type for p in model.parameters() if not p.is_meta), "cpu"),
            list(extra),
            _tensors(model),
            walk.model(model),
            walk.sources(),
        ]
    except UnkeyableError:
        return None
    return text_digest(described)


def _versions() -> list[str]:
    own = [file_digest(_OWN_SOURCES / f"{name}.py") for name in _CAPTURING]
    return [torch.__version__, platform.python_version(), *own]


def _tensors(model: nn.Module) -> list[Any]:
    first: dict[int, str] = {}
    described: list[Any] = []
    for kind, named in (
        ("parameter", model.named_parameters(remove_duplicate=False)),
        ("buffer", model.named_buffers(remove_duplicate=False)),
    ):
        for name, value in named:
            tied_to = first.setdefault(id(value), name)
            described.append([kind, name, tied_to, list(value.shape), str(value.dtype), value.requires_grad])
    return described


# --- the walk -------------------------------------------------------------------------------


class _Walk:
    """Describes a model's objects as JSON; every object is opened once."""

    def __init__(self) -> None:
        self._digests: dict[int, str] = {}  # by id; "" while the object is being described
        self._kept: list[object] = []  # so that no id is used twice
        self._paths: dict[int, str] = {}  # of the model's own modules, by id
        self._files: dict[str, str] = {}
        self._members_of: dict[int, list[Any]] = {}  # members of the user's classes, by id of the class

    def model(self, model: nn.Module) -> Any:
        """Every submodule's class and plain attributes, by path."""
        self._paths = {id(module): path for path, module in model.named_modules()}
        return [[path, self._module(module)] for path, module in model.named_modules(remove_duplicate=False)]

    def sources(self) -> list[Any]:
        """Digests of the files met, of the user's loaded modules, and versions of the packages they use."""
        packages: set[str] = set()
        for module in list(sys.modules.values()):
            path = source_path(module)
            if path is not None and is_users(path):
                self._file(path)
                packages.update(packages_used(module))
        members = list(self._members_of.values())
        return [sorted(self._files.items()), sorted(package_versions(packages)), members]

    def _module(self, module: nn.Module) -> Any:
        attributes = {name: value for name, value in vars(module).items() if name not in _SKIPPED_ATTRIBUTES}
        return [self._class(type(module)), self._attributes(attributes, 0)]

    def _attributes(self, attributes: Mapping[str, Any], depth: int) -> Any:
        described = {}
        for name, value in attributes.items():
            if name in _PER_PROCESS_ATTRIBUTES:
                continue
            hooks = name.endswith("hooks") or "_hooks_" in name
            values = list(value.values()) if hooks and isinstance(value, Mapping) else value
            described[name] = self._value(values, depth)
        return described

    def _class(self, kind: type) -> Any:
        for base in kind.__mro__:
            module = sys.modules.get(base.__module__)
            path = source_path(module) if module is not None else None
            if path is not None and not is_standard(path):
                self._file(path)
                if is_users(path):
                    self._members(base)
            elif path is None and base.__module__ not in sys.builtin_module_names and not is_compiled(module):
                raise UnkeyableError
        return f"{kind.__module__}.{kind.__qualname__}"

    def _members(self, kind: type) -> None:
        """A user's class may have been made by a function, or changed since: its members as they are now."""
        if id(kind) not in self._members_of:
            self._kept.append(kind)
            self._members_of[id(kind)] = []  # while it is being described
            self._members_of[id(kind)] = [
                [name, self._value(value, 0)] for name, value in members_of_class(kind)
            ]

    def _file(self, path: str) -> None:
        if path not in self._files:
            self._files[path] = file_digest(Path(path))

    def _value(self, value: Any, depth: int) -> Any:
        if isinstance(value, enum.Enum):
            return [self._class(type(value)), value.name]
        if type(value) in _BY_REPR:
            return [type(value).__name__, repr(value)]
        if isinstance(value, float):
            return ["float", value.hex()]
        if depth > _MAX_DEPTH:
            raise UnkeyableError
        if id(value) in self._paths:
            return ["module", self._paths[id(value)]]
        known = self._digests.get(id(value))
        if known is None:
            self._digests[id(value)] = ""
            self._kept.append(value)
            known = text_digest(self._opened(value, depth + 1))
            self._digests[id(value)] = known
        return known or "inside itself"

    def _opened(self, value: Any, depth: int) -> Any:
        if isinstance(value, Tensor):
            return tensor_digest(value)
        if isinstance(value, np.ndarray):
            return array_digest(value)
        if isinstance(value, type):
            return ["class", self._class(value)]
        if isinstance(
            value, (types.FunctionType, types.MethodType, types.BuiltinFunctionType, functools.partial)
        ):
            return self._callable(value, depth)
        if isinstance(value, logging.Logger):
            return ["logger", value.name]
        if isinstance(value, re.Pattern):
            return ["pattern", value.pattern, value.flags]
        if isinstance(value, (set, frozenset)):
            return ["set", sorted(json.dumps(self._value(item, depth)) for item in value)]
        if isinstance(value, dict):
            items = [[self._value(key, depth), self._value(item, depth)] for key, item in value.items()]
            return [self._class(type(value)), items]
        if isinstance(value, (list, tuple)):
            return [self._class(type(value)), [self._value(item, depth) for item in value]]
        if isinstance(value, (torch._ops.OpOverload, torch._ops.OpOverloadPacket)):
            return ["operator", str(value)]
        return self._object(value, depth)

    def _callable(self, value: Any, depth: int) -> Any:
        if isinstance(value, functools.partial):
            inside = (value.func, value.args, value.keywords)
            return ["partial", [self._value(item, depth) for item in inside]]
        if isinstance(value, types.MethodType):
            return ["method", self._value(value.__self__, depth), self._value(value.__func__, depth)]
        if isinstance(value, types.BuiltinFunctionType):
            if isinstance(value.__self__, (types.ModuleType, type(None))):
                return ["builtin", value.__module__, value.__qualname__]
            return ["builtin", self._value(value.__self__, depth), value.__qualname__]
        return self._function(value, depth)

    def _function(self, function: types.FunctionType, depth: int) -> Any:
        path = function.__code__.co_filename
        if not Path(path).is_file():
            raise UnkeyableError
        if not is_standard(path):
            self._file(path)
        cells = [cell.cell_contents for cell in function.__closure__ or ()]
        bound = [function.__defaults__, function.__kwdefaults__, cells]
        place = [function.__qualname__, function.__code__.co_firstlineno]
        reached = globals_of(function) if is_users(path) else {}
        return [
            *("function", path, *place, code_of(function.__code__)),
            [self._value(item, depth) for item in bound],
            [[name, self._value(value, depth)] for name, value in reached.items()],
        ]

    def _object(self, value: Any, depth: int) -> Any:
        if isinstance(value, nn.Module):  # held as a plain attribute
            return ["module", self._module(value), _tensors(value)]
        slots = [name for kind in type(value).__mro__ for name in _slots(kind) if hasattr(value, name)]
        if not slots and not hasattr(value, "__dict__"):
            raise UnkeyableError
        attributes = {**getattr(value, "__dict__", {}), **{name: getattr(value, name) for name in slots}}
        if not attributes and not (dataclasses.is_dataclass(value) or inspect.isclass(type(value))):
            raise UnkeyableError
        return [self._class(type(value)), self._attributes(attributes, depth)]


def _slots(kind: type) -> tuple[str, ...]:
    slots = kind.__dict__.get("__slots__", ())
    return (slots,) if isinstance(slots, str) else tuple(name for name in slots if not name.startswith("__"))
