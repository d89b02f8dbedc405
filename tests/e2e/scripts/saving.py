"""``morphing.py``, but worker 0 saves for as long as there is no file ``go``; the file ``saving`` tells."""

from __future__ import annotations

import runpy
import time
from pathlib import Path

from tests.cases import jobs

encode = jobs.encode


def slowly(value):
    Path("saving").touch()
    while not Path("go").exists():
        time.sleep(0.005)
    return encode(value)


jobs.encode = slowly
runpy.run_path(str(Path(__file__).with_name("morphing.py")), run_name="__main__")
