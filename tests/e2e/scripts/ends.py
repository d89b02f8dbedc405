"""Ends in one way: ``ends.py well | raise | exit | kill | wait``, where only worker 0 kills itself. No job."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path

how = sys.argv[1]
if how == "raise":
    raise ValueError("as was asked")
if how == "exit":
    sys.exit(3)
if how == "kill" and os.environ["RANK"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
if how in ("kill", "wait"):
    Path("waits").touch()
    signal.pause()
