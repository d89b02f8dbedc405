"""A loading thread and the end of its process."""

import subprocess
import sys


def test_a_process_that_ends_while_its_thread_loads_ends_well():
    """The thread is inside torch code at almost any moment; a process of its own, since it must end."""
    code = """
import threading
import torch
from varuna.run.data import MicroBatchLoader

class Busy:
    def __len__(self):
        return 4000
    def __getitem__(self, index):
        x = torch.ones(4) * index
        for _ in range(200):
            x = (x * 1.0001 + 0.1).sin()
        return x

loader = MicroBatchLoader(Busy(), None, seed=0, batch_size=8, micro_batch_size=2, micro_batch_range=range(4))
loader.get(0, 0)
assert any(thread.name == "varuna-data" for thread in threading.enumerate())
"""
    for _ in range(3):
        done = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=60
        )
        assert (done.returncode, done.stderr) == (0, "")
