"""How many GPUs a job may use, without torch and without touching CUDA."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Mapping

_QUERY_TIMEOUT_S = 10.0


def count_visible(listing: str, visible: str | None) -> int:
    """GPUs that CUDA will show.

    Args:
        listing: output of ``nvidia-smi -L``; empty if there is none.
        visible: value of ``CUDA_VISIBLE_DEVICES``; None if unset. As CUDA does, an entry that names no
            device ends the list.
    """
    devices = [line for line in listing.splitlines() if line.startswith("GPU ")]
    if visible is None or not devices:
        return len(devices)
    count = 0
    for entry in (part.strip() for part in visible.split(",")):
        is_index = entry.isdecimal() and int(entry) < len(devices)
        is_id = entry.startswith(("GPU-", "MIG-")) and entry in listing
        if not (is_index or is_id):
            break
        count += 1
    return count


def visible_gpus(environ: Mapping[str, str]) -> int:
    """GPUs of this machine that the environment lets a job use; 0 without a working ``nvidia-smi``."""
    command = shutil.which("nvidia-smi", path=environ.get("PATH"))
    if command is None:
        return 0
    try:
        result = subprocess.run(
            [command, "-L"], capture_output=True, text=True, check=False, timeout=_QUERY_TIMEOUT_S
        )
    except (OSError, subprocess.TimeoutExpired):
        return 0
    listing = result.stdout if result.returncode == 0 else ""
    return count_visible(listing, environ.get("CUDA_VISIBLE_DEVICES"))
