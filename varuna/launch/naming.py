"""Names of runs: what people see in paths and logs."""

from __future__ import annotations

import re
import secrets
import time
from pathlib import Path


def new_run_id(script: str) -> str:
    """A name that no other run has: script, local time, four random hexadecimal digits."""
    stem = re.sub(r"[^A-Za-z0-9_.]+", "_", Path(script).stem) or "run"
    return f"{stem}-{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
