"""``machines.py``, with the variable ODD and the arguments left in a file; ODD=exit exits with 7 instead."""

from __future__ import annotations

import os
import runpy
import sys
from pathlib import Path

Path(f"odd-{os.environ['VARUNA_INCARNATION']}").write_text(os.environ["ODD"] + "|".join(sys.argv[2:]))
if os.environ["ODD"] == "exit":
    sys.exit(7)
runpy.run_path(str(Path(__file__).with_name("machines.py")), run_name="__main__")
