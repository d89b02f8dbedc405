"""What a process frees stays its own, counted in page faults: each is a page that the system had taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys
import torch
from varuna.heap import keep_freed_memory, return_memory

def faults():
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt

def resident():
    return int(open("/proc/self/statm").read().split()[1]) * resource.getpagesize()

def step():
    activations = [torch.ones(1 << 18) for _ in range(64)]  # 1 MiB each
    while activations:
        activations.pop()

kept = sys.argv[1] == "keep" and keep_freed_memory()
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
taken, held = faults() - before, resident()
return_memory()
print(int(kept), taken // 10, (held - resident()) >> 20)
"""


def figures(how: str, **environ: str) -> tuple[bool, int, int]:
    """Whether memory is kept, page faults of a step of 64 MiB, MiB that ``return_memory`` then gave back."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT, how],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults, returned = map(int, done.stdout.split())
    return bool(kept), faults, returned


def test_memory_of_a_step_is_kept_for_the_next_and_given_back_when_asked_for() -> None:
    num_pages = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
    kept, faults, returned = figures("keep")
    assert kept
    assert faults < num_pages // 50
    assert returned >= 60
    _, usual_faults, _ = figures("usual")
    assert usual_faults > num_pages // 2, "glibc keeps memory by itself here: nothing is shown"


@pytest.mark.parametrize("name", ["MALLOC_TRIM_THRESHOLD_", "GLIBC_TUNABLES"])
def test_settings_of_the_user_stay(name: str) -> None:
    value = "glibc.malloc.trim_threshold=1048576" if name == "GLIBC_TUNABLES" else "1048576"
    kept, _, _ = figures("keep", **{name: value})
    assert not kept
