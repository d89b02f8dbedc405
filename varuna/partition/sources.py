"""Digests of source files and of values, for the key of a captured graph."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import sysconfig
import types
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor


class UnkeyableError(Exception):
    """Something that differs between processes or cannot be looked into."""


_STANDARD = tuple(
    str(Path(sysconfig.get_path(name)).resolve())
    for name in ("stdlib", "platstdlib")
    if sysconfig.get_path(name)
)
_PACKAGES = tuple(str(Path(sysconfig.get_path(name)).resolve()) for name in ("purelib", "platlib"))
_TORCH = f"{Path(torch.__file__).resolve().parent}{os.sep}"
_VARUNA = f"{Path(__file__).resolve().parent.parent}{os.sep}"


def source_path(module: types.ModuleType | None) -> str | None:
    """The Python file of a module, if it has one."""
    path = getattr(module, "__file__", None)
    return path if isinstance(path, str) and path.endswith(".py") and Path(path).is_file() else None


def is_compiled(module: types.ModuleType | None) -> bool:
    """Whether a module is an extension module."""
    path = getattr(module, "__file__", None)
    return isinstance(path, str) and not path.endswith(".py")


def is_standard(path: str) -> bool:
    """Whether versions already tell what is in the file: Python's own library, torch, or this package."""
    # Most loaded modules are seen to be so as they are written; looking for links takes far longer.
    return _lies_in_standard(path) or _lies_in_standard(str(Path(path).resolve()))


def _lies_in_standard(path: str) -> bool:
    if path.startswith((_TORCH, _VARUNA)):
        return True
    return path.startswith(_STANDARD) and not path.startswith(_PACKAGES) and "site-packages" not in path


def is_users(path: str) -> bool:
    """Whether the file is neither Python's nor an installed package's."""
    if is_standard(path):
        return False
    resolved = str(Path(path).resolve())
    return not resolved.startswith(_PACKAGES) and "site-packages" not in resolved


def packages_used(module: types.ModuleType) -> set[str]:
    """Top-level names of what a module has imported."""
    names = set()
    for value in list(vars(module).values()):
        name = value.__name__ if isinstance(value, types.ModuleType) else getattr(value, "__module__", None)
        if isinstance(name, str):
            names.add(name.partition(".")[0])
    return names


def package_versions(names: set[str]) -> list[list[str]]:
    """Name and version of those packages that state one."""
    found = []
    for name in names:
        version = vars(sys.modules[name]).get("__version__") if name in sys.modules else None
        if isinstance(version, str):
            found.append([name, version])
    return found


def text_digest(described: Any) -> str:
    """Digest of something described as JSON."""
    return hashlib.sha256(json.dumps(described, sort_keys=True).encode()).hexdigest()


def file_digest(path: Path) -> str:
    """Digest of a file."""
    return hashlib.sha256(path.read_bytes()).hexdigest()


def tensor_digest(value: Tensor) -> Any:
    """Kind and values of a tensor."""
    if value.is_meta or value.layout is not torch.strided:
        raise UnkeyableError
    raw = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
    shape = [list(value.shape), str(value.dtype), value.requires_grad]
    return ["tensor", *shape, hashlib.sha256(raw).hexdigest()]


def array_digest(value: np.ndarray[Any, Any]) -> Any:
    """Kind and values of an array."""
    if value.dtype.hasobject:
        raise UnkeyableError
    return ["array", list(value.shape), str(value.dtype), hashlib.sha256(value.tobytes()).hexdigest()]
