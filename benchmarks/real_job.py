"""A small GPT or ResNet, trained for a few steps: what ``bench_real_steps`` profiles and then measures.

    varuna run -w 2 -p 2 -m benchmarks.real_job gpt FOLDER --steps 12

Every worker writes its step times and peak memory to ``FOLDER/<rank>.json``, worker 0 ``plan.json``.
"""

from __future__ import annotations

import argparse
import itertools
import json
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varuna
from benchmarks import gpt
from varuna.plan.profile_file import write_plan

BATCH_SIZE = 16
_NUM_SAMPLES, _PIXELS, _CLASSES = 256, 32, 10


class Residual(nn.Module):
    """Two 3x3 convolutions and a way around them: ``[batch, channels, side, side]``, sides over ``stride``."""

    def __init__(self, channels: int, wider: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, wider, 3, stride, 1, bias=False)
        self.second = nn.Conv2d(wider, wider, 3, 1, 1, bias=False)
        self.norm_1, self.norm_2 = nn.BatchNorm2d(wider), nn.BatchNorm2d(wider)
        self.short = nn.Conv2d(channels, wider, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Images to images."""
        y = F.relu(self.norm_1(self.first(x)))
        return F.relu(self.norm_2(self.second(y)) + self.short(x))


class ResNet(nn.Module):
    """Nine residual blocks at three sizes, and a linear head, with the loss."""

    def __init__(self) -> None:
        super().__init__()
        widths = (32, 32, 32, 32, 64, 64, 64, 128, 128, 128)
        self.stem = nn.Conv2d(3, widths[0], 3, padding=1)
        self.blocks = nn.ModuleList(
            Residual(before, after, 1 if before == after else 2) for before, after in itertools.pairwise(widths)
        )
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in self.blocks)
        self.head = nn.Linear(widths[-1], _CLASSES)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        """``[batch, 3, side, side]`` and ``[batch]``, to a scalar."""
        x = self.stem(images)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            x = cut(block(x))
        return F.cross_entropy(self.head(x.mean((2, 3))), labels)


class Images(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Noise, in memory."""

    def __init__(self) -> None:
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(_NUM_SAMPLES, 3, _PIXELS, _PIXELS, generator=generator)
        self.labels = torch.randint(0, _CLASSES, (_NUM_SAMPLES,), generator=generator)

    def __len__(self) -> int:
        return len(self.images)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """One image and its label."""
        return {"images": self.images[index], "labels": self.labels[index]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=("gpt", "resnet"))
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=12)
    options = parser.parse_args()
    torch.manual_seed(0)
    model = gpt.GPT() if options.model == "gpt" else ResNet()
    data = gpt.Text(_NUM_SAMPLES) if options.model == "gpt" else Images()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    job = varuna.Varuna(model, optimizer, data, batch_size=BATCH_SIZE, progress=False)
    steps = list(job.train(options.steps))
    if job.rank == 0:
        write_plan(job.plan, options.folder / "plan.json")
    found = {"step_s": [step.duration_s for step in steps], "memory_bytes": steps[-1].memory_bytes}
    (options.folder / f"{job.rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    main()
