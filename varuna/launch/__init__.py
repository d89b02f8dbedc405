"""Starts workers on this machine and sees the job to its end, whatever ends it. Never imports torch itself.

Names are imported when first used: the command line needs most of it for few commands.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from varuna.launch.devices import visible_gpus
    from varuna.launch.job import LocalJob
    from varuna.launch.local import run_local

__all__ = ["LocalJob", "run_local", "visible_gpus"]

_ELSEWHERE = {
    "LocalJob": "varuna.launch.job",
    "run_local": "varuna.launch.local",
    "visible_gpus": "varuna.launch.devices",
}


def __getattr__(name: str) -> object:
    if name not in _ELSEWHERE:
        raise AttributeError(f"module 'varuna.launch' has no attribute {name!r}")
    value: object = getattr(importlib.import_module(_ELSEWHERE[name]), name)
    globals()[name] = value
    return value
