"""What all examples need: to say something, to pick a number format, to make a file once for all workers."""

from __future__ import annotations

import fcntl
import os
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch


def say(text: str) -> None:
    print(text, flush=True)


def fast_precision() -> str:
    """bf16 on a GPU, or on a CPU that multiplies in it; else fp32."""
    if torch.cuda.is_available():
        return "bf16"
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    return "bf16" if "avx512_bf16" in flags or "amx_bf16" in flags else "fp32"


def made_once(target: Path, make: Callable[[Path], None]) -> Path:
    """``target``, a file or a folder; if it is not there, the first worker of this machine makes it for all.

    Args:
        target: where it is to be.
        make: makes it at the path it is given. It gets its real name when it is whole.
    """
    target.parent.mkdir(parents=True, exist_ok=True)
    with (target.parent / ".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the kernel gives it back when the process ends, however it does
        if not target.exists():
            with tempfile.TemporaryDirectory(dir=target.parent) as folder:
                unfinished = Path(folder) / target.name
                make(unfinished)
                os.replace(unfinished, target)
    return target
