"""Which of the user's modules and which line of code stopped capture."""

from __future__ import annotations

import linecache
import os
import types
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

_CALL_CODE = nn.Module._call_impl.__code__
_HIDDEN = (os.path.dirname(torch.__file__) + os.sep, os.path.dirname(__file__) + os.sep)


@dataclass(frozen=True, kw_only=True)
class Blame:
    """Where capture stopped.

    Attributes:
        modules: paths of the modules that were executing, outermost first; the root is ``""``.
        location: ``file:line`` of the innermost line that is the user's or a library's, not torch's; may be
            empty.
        source: that line.
    """

    modules: tuple[str, ...]
    location: str
    source: str

    def __str__(self) -> str:
        return f"{self.location}: `{self.source}`" if self.location else "an unknown line"


def find_blame(error: BaseException, model: nn.Module) -> Blame:
    """Reads the traceback of what was raised while ``model`` ran, and of its causes; the deepest one counts."""
    best = Blame(modules=(), location="", source="")
    for exception in causes(error):
        found = _read(exception, model)
        if len(found.modules) > len(best.modules) or not best.location:
            best = found
    return best


def causes(error: BaseException) -> Iterator[BaseException]:
    """The error, what it was raised from, and so on."""
    current: BaseException | None = error
    seen: set[int] = set()
    while current is not None and id(current) not in seen:
        seen.add(id(current))
        yield current
        current = current.__cause__ or current.__context__


def _read(error: BaseException, model: nn.Module) -> Blame:
    paths = {id(module.__dict__): path for path, module in model.named_modules()}
    modules: list[str] = []
    location, source = "", ""
    traceback: types.TracebackType | None = error.__traceback__
    while traceback is not None:
        frame = traceback.tb_frame
        if frame.f_code is _CALL_CODE:
            path = paths.get(id(frame.f_locals["self"].__dict__))
            if path is not None and (not modules or modules[-1] != path):
                modules.append(path)
        elif modules and not frame.f_code.co_filename.startswith(_HIDDEN):
            location = f"{frame.f_code.co_filename}:{traceback.tb_lineno}"
            source = linecache.getline(frame.f_code.co_filename, traceback.tb_lineno).strip()
        traceback = traceback.tb_next
    return Blame(modules=tuple(modules), location=location, source=source)
