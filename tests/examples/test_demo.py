"""The demo, small: workers are killed, join and leave while a real job trains, and its losses stay the same."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

DEMO = Path(__file__).parents[2] / "examples" / "demo.py"
SMALL = {
    "--layers": 2, "--width": 64, "--heads": 2, "--seq-length": 32, "--vocab-size": 300, "--batch-size": 32,
    "--eval-every": 1000, "--eval-samples": 4, "--sample-tokens": 4, "--precision": "fp32",
}  # fmt: skip


@pytest.mark.examples
def test_the_loss_goes_on(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog lay on the rug. " * 2000)
    arguments = ["--data", str(tmp_path / "text.txt"), *(str(word) for item in SMALL.items() for word in item)]
    command = [sys.executable, str(DEMO), "--steps", "120", "--save-dir", str(tmp_path), "--", *arguments]
    done = subprocess.run(
        command,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    for told in (
        r"demo: after step \d+: worker 3 is killed \(kill -9 \d+\)",
        r"demo:   lost: \S+\.3\.\w+ is gone: was ended by signal 9",
        r"demo:   running: generation \d+ runs from step \d+ on: 2 of 3 workers, 1 pipeline",
        r"demo: after step \d+: a new worker is asked for \(varuna workers add 1\)",
        r"demo:   ready: \S+\.4\.\w+ is ready to join",
        r"demo: after step \d+: worker 1 has to go \(varuna preempt 1\)",
        r"demo:   notice: \S+\.1\.\w+ is asked to leave",
        r"Largest difference over 120 steps: 0\.\d\d%\. The loss goes on as if nothing had happened\.",
        r"120 steps in \d+ generations, .* each once, with its samples",
    ):
        assert re.search(told, done.stdout), f"{told}\n{done.stdout}"
