"""Names of runs: what people see in paths and logs."""

from __future__ import annotations

import os
import re
import secrets
import time
from collections.abc import Mapping
from pathlib import Path

SKYPILOT_TASK = "SKYPILOT_TASK_ID"
"""SkyPilot's name for what it runs: that of a managed job stays the same when it is recovered elsewhere."""

_MOST_LETTERS = 150
_NOT_ALLOWED = re.compile(r"[^A-Za-z0-9_.-]+")


def new_run_id(script: str, environ: Mapping[str, str] = os.environ) -> str:
    """A name that no other run has: SkyPilot's, else script, local time and four random hexadecimal digits.

    Args:
        script: what runs.
        environ: this process's.
    """
    task = _NOT_ALLOWED.sub("_", environ.get(SKYPILOT_TASK, "")).lstrip(".-")
    if task:
        return task[-_MOST_LETTERS:].lstrip(".-")
    stem = re.sub(r"[^A-Za-z0-9_.]+", "_", Path(script).stem) or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
