"""From ``varuna run`` to the first completed step of the demo with 4 workers.

With an empty cache, then again; and the very first one on a machine, on which nothing is compiled either.

The clock stops when worker 0 prints the line of step 1. Seconds: lower is better.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from benchmarks import report

FIRST_STEP = re.compile(r"^step +1/")
TARGETS: dict[str, float | str] = {"cold cache": 20.0, "second start": 10.0, "nothing compiled": ""}
REPOSITORY = Path(__file__).parents[1]


def seconds_to_first_step(environment: dict[str, str], script: str, timeout_s: float = 120.0) -> float:
    """Start the demo, wait for the first step, end it.

    Raises:
        RuntimeError: the demo ended, or ``timeout_s`` passed, before its first step; its last lines are shown.
    """
    command = [str(Path(sys.executable).with_name("varuna")), "run", "--workers", "4", "--stages", "2", script]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1", **environment}
    start = time.monotonic()
    process = subprocess.Popen(
        command, cwd=REPOSITORY, env=environment, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
    )
    assert process.stdout is not None
    lines: list[str] = []
    timer = threading.Timer(timeout_s, process.terminate)
    timer.start()
    try:
        for line in process.stdout:
            lines.append(line)
            if FIRST_STEP.match(line):
                return time.monotonic() - start
    finally:
        timer.cancel()
        process.send_signal(signal.SIGINT)
        try:
            process.wait(10)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        process.stdout.close()
    raise RuntimeError(f"{' '.join(command)} ended before its first step:\n{''.join(lines[-30:])}")


def main() -> None:
    options = report.arguments(__doc__ or "", repeats=3)
    script = str(REPOSITORY / "examples" / "gpt.py")
    rows: list[list[object]] = []
    seconds: dict[str, list[float]] = {name: [] for name in TARGETS}
    for _ in range(options.repeats):
        with tempfile.TemporaryDirectory(prefix="varuna-bench-") as folder:
            kept, fresh = {"VARUNA_CACHE_DIR": f"{folder}/kept"}, {"VARUNA_CACHE_DIR": f"{folder}/fresh"}
            environments = (kept, kept, {**fresh, "NUMBA_CACHE_DIR": f"{folder}/numba"})
            for name, environment in zip(TARGETS, environments, strict=True):
                seconds[name].append(seconds_to_first_step(environment, script))
    for name, values in seconds.items():
        rows.append([name, sorted(values)[len(values) // 2], max(values), TARGETS[name]])
    header = ["start", "median s", "slowest s", "target"]
    report.report("From varuna run to the first step", report.table(header, rows), options.log)


if __name__ == "__main__":
    main()
