"""Loops are compiled once a machine, ahead of their first use, by one process while others wait."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
import threading
from pathlib import Path

from varuna.plan.compiled import LOCK_FILE, compile_loops, wait_for_compiler

PROGRAM = """
import sys
from pathlib import Path
from varuna.plan import border_kernel, kernel
from varuna.plan.choose import choose_plan
from varuna.plan.cluster import Cluster
from varuna.plan.compiled import compile_loops
from varuna.plan.estimate import estimated_profile

cache = Path(sys.argv[1])
print(compile_loops(cache), compile_loops(cache))
loops = [kernel.run_compiled, border_kernel.fill, border_kernel.walk, border_kernel.stage_of]
before = [len(loop.signatures) for loop in loops]
choose_plan(estimated_profile("bert-large", "v100"), Cluster.parse("3x2"), batch_size=64)
print(before == [len(loop.signatures) for loop in loops], all(before))
"""


def test_nothing_is_left_to_compile_for_another_model(tmp_path: Path) -> None:
    environ = {**os.environ, "NUMBA_CACHE_DIR": str(tmp_path / "numba")}
    command = [sys.executable, "-c", PROGRAM, str(tmp_path / "cache")]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == ["True False", "True True"]
    again = subprocess.run(command, env=environ, capture_output=True, text=True, check=True)
    assert again.stdout.splitlines()[0] == "False False"


def test_whoever_needs_the_result_waits_for_it(tmp_path: Path) -> None:
    waited = threading.Event()

    def wait() -> None:
        wait_for_compiler(tmp_path)
        waited.set()

    with (tmp_path / LOCK_FILE).open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting = threading.Thread(target=wait)
        waiting.start()
        assert not waited.wait(0.2)
    assert waited.wait(10)
    waiting.join()


def test_without_a_place_for_the_lock_nobody_waits(tmp_path: Path) -> None:
    wait_for_compiler(tmp_path / "none")
    (tmp_path / "file").touch()
    wait_for_compiler(tmp_path / "file")


def test_what_is_compiled_is_not_compiled_again(tmp_path: Path) -> None:
    compile_loops(tmp_path)
    assert not compile_loops(tmp_path)
