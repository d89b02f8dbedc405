"""What a process frees stays its own, counted in page faults: each is a page that the system had taken back."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

NUM_PAGES = (64 << 20) // os.sysconf("SC_PAGE_SIZE")
SCRIPT = """
import resource
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

kept = keep_freed_memory()
for _ in range(3):
    step()
before = faults()
for _ in range(10):
    step()
taken, held = faults() - before, resident()
return_memory()
print(int(kept), taken // 10, (held - resident()) >> 20)
"""


def figures(**environ: str) -> tuple[bool, int, int]:
    """Whether memory is kept, page faults of a step of 64 MiB, MiB that ``return_memory`` then gave back."""
    done = subprocess.run(
        [sys.executable, "-c", SCRIPT],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environ},
        capture_output=True,
        text=True,
        check=True,
    )
    kept, faults, returned = map(int, done.stdout.split())
    return bool(kept), faults, returned


def test_memory_of_a_step_is_kept_for_the_next_and_given_back_when_asked_for() -> None:
    kept, faults, returned = figures()
    assert kept
    assert faults < NUM_PAGES // 50
    assert returned >= 60


@pytest.mark.parametrize(
    ("name", "value"),
    [("MALLOC_MMAP_THRESHOLD_", "131072"), ("GLIBC_TUNABLES", "glibc.malloc.mmap_threshold=131072")],
)
def test_settings_of_the_user_stay(name: str, value: str) -> None:
    """Here that every piece is mapped by itself, and goes back at once."""
    kept, faults, _ = figures(**{name: value})
    assert not kept
    assert faults > NUM_PAGES // 2
