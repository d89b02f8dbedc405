"""Trains 67 million parameters with AdamW: ``memory.py meta|cpu LIMIT_MB STEPS``, 0 for no limit.

The limit is set before the model is built, over what the interpreter with torch takes already. Every worker
leaves ``memory-<rank>.json``: bytes resident at the start, with the model built, with the job started and at
the peak, and the bytes of its parameters.
"""

from __future__ import annotations

import json
import resource
import sys
from pathlib import Path

import psutil
import torch
from torch import Tensor, nn

import varuna

WIDTH, NUM_BLOCKS = 1024, 8


class Block(nn.Module):
    """8.4 million parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(torch.relu(self.up(x)))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(NUM_BLOCKS)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().mean()


def limit_memory(megabytes: int) -> None:
    """Let this process map so many bytes of private memory beyond what it has."""
    own_pages = int(Path("/proc/self/statm").read_text().split()[5])
    limit = own_pages * resource.getpagesize() + megabytes * 2**20
    resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))


def resident() -> int:
    return psutil.Process().memory_info().rss


kind, limit_mb, num_steps = sys.argv[1], int(sys.argv[2]), int(sys.argv[3])
at_start = resident()
if limit_mb:
    limit_memory(limit_mb)
torch.manual_seed(0)
with torch.device("meta" if kind == "meta" else "cpu"):
    model = Model()
built = resident()
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
samples = [torch.linspace(-1, 1, WIDTH) * (index + 1) / 8 for index in range(8)]
job = varuna.Varuna(model, optimizer, samples, batch_size=8, check=False)
held = [parameter for parameter in model.parameters() if job.plan and not parameter.is_meta]
started = resident()
losses = [step.loss for step in job.train(num_steps)]
peaks = [step.memory_bytes for step in job.train(1)]
figures = {
    "at_start": at_start,
    "built": built,
    "started": started,
    "peak": peaks[0],
    "parameter_bytes": sum(parameter.numel() * parameter.element_size() for parameter in held),
    "whole_bytes": sum(parameter.numel() * parameter.element_size() for parameter in model.parameters()),
    "losses": losses,
}
Path(f"memory-{job.rank}.json").write_text(json.dumps(figures))
