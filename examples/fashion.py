"""Train a ResNet on Fashion-MNIST, on any number of workers, and say how many test images it gets right.

    varuna run --workers 2 examples/fashion.py                   # about three minutes on two cores: 0.90
    python examples/fashion.py --steps 100                       # the same script, one worker
    varuna run --workers 8 examples/fashion.py --width 64 --blocks 3,4,6,3 --epochs 20    # more of everything

The images are those of Debian's package ``dataset-fashion-mnist``, or of the folder that ``--data`` names, with
the same four files: 60,000 to train on and 10,000 to test. The weights (``model.safetensors``) and the losses
(``summary.json``) go to ``--save``.

Scale it up with ``--width`` and ``--blocks``: 64 and ``2,2,2,2`` have the layers of a ResNet-18, 64 and
``3,4,6,3`` those of a ResNet-34. Your own images need a dataset of (image, label) in place of ``Images``.
"""

from __future__ import annotations

import argparse
import gzip
import json
import time
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from common import fast_precision, say
from safetensors.torch import save_model
from torch import Tensor, nn
from torch.utils.data import Dataset

import varuna

PACKAGE = Path("/usr/share/datasets/fashion-mnist")
MEAN, DEVIATION = 0.286, 0.353
"""Of the training images' pixels, of 0 to 1."""


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a ResNet on Fashion-MNIST.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, default=PACKAGE, help="folder with the four *-ubyte.gz files")
    parser.add_argument("--epochs", type=float, default=2.0, help="times that every training image is seen")
    parser.add_argument("--steps", type=int, help="optimizer updates; overrides --epochs")
    parser.add_argument("--batch-size", type=int, default=128, help="images in a global batch")
    parser.add_argument("--width", type=int, default=32, help="channels at the beginning; double in each group")
    parser.add_argument("--blocks", default="2,2", help="residual blocks in each group")
    parser.add_argument("--lr", type=float, default=0.1, help="highest learning rate")
    parser.add_argument("--weight-decay", type=float, default=5e-4)
    parser.add_argument("--precision", default=fast_precision(), help="fp32, bf16, fp16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("runs/fashion"))
    return parser.parse_args()


class Images(Dataset[tuple[Tensor, int]]):
    """Images as (float32 of (1, 28, 28), label). With ``mirrored``, as many again, left and right exchanged."""

    def __init__(self, folder: Path, which: str, *, mirrored: bool = False) -> None:
        pixels = read_idx(folder / f"{which}-images-idx3-ubyte.gz")  # (N, 28, 28)
        self._images = torch.from_numpy((pixels / np.float32(255.0) - MEAN) / DEVIATION)[:, None]
        self._labels = torch.from_numpy(read_idx(folder / f"{which}-labels-idx1-ubyte.gz").astype(np.int64))
        self._num_views = 2 if mirrored else 1

    def __len__(self) -> int:
        return len(self._images) * self._num_views

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        view, place = divmod(index, len(self._images))
        image = self._images[place]
        return image.flip(-1) if view else image, int(self._labels[place])

    def batches(self, size: int) -> zip[tuple[Tensor, Tensor]]:
        """All of them in order, without mirror images."""
        return zip(self._images.split(size), self._labels.split(size), strict=True)


def read_idx(path: Path) -> np.ndarray:
    """An array of bytes from a file in IDX format: two zeros, type 8, number of dimensions, sizes, bytes.

    Raises:
        SystemExit: it is not there, or is something else.
    """
    if not path.is_file():
        raise SystemExit(
            f"{path} is not there. Install Debian's dataset-fashion-mnist, or say --data FOLDER with the files "
            f"train-images-idx3-ubyte.gz, train-labels-idx1-ubyte.gz and the same with t10k-."
        )
    content = gzip.decompress(path.read_bytes())
    num_dimensions = content[3]
    if content[:3] != b"\0\0\x08":
        raise SystemExit(f"{path} is no IDX file of bytes: it begins with {content[:4]!r}.")
    shape = np.frombuffer(content, ">i4", count=num_dimensions, offset=4)
    return np.frombuffer(content, np.uint8, offset=4 + 4 * num_dimensions).reshape(shape)


class Block(nn.Module):
    """Two 3x3 convolutions added to their input, which a 1x1 convolution fits if the shape changes."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(num_in, num_out, 3, stride, padding=1, bias=False)
        self.first_norm = nn.BatchNorm2d(num_out)
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.second_norm = nn.BatchNorm2d(num_out)
        self.skip: nn.Module = nn.Identity()
        if stride != 1 or num_in != num_out:
            self.skip = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, x: Tensor) -> Tensor:
        """(B, C, H, W) to (B, C', H / stride, W / stride)."""
        hidden = F.relu(self.first_norm(self.first(x)))
        return F.relu(self.second_norm(self.second(hidden)) + self.skip(x))


class ResNet(nn.Module):
    """Images of one channel to scores of ten classes. Each group of blocks but the first halves the image."""

    def __init__(self, width: int, blocks: list[int]) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(1, width, 3, 2, padding=1, bias=False), nn.BatchNorm2d(width), nn.ReLU()
        )
        channels = width
        self.blocks = nn.ModuleList()
        for group, count in enumerate(blocks):
            for place in range(count):
                stride = 2 if group and not place else 1
                self.blocks.append(Block(channels, width << group, stride))
                channels = width << group
        self.head = nn.Linear(channels, 10)

    def forward(self, images: Tensor) -> Tensor:
        """(B, 1, 28, 28) to (B, 10)."""
        x = self.stem(images.to(memory_format=torch.channels_last))  # faster on CPUs and GPUs
        for block in self.blocks:
            x = block(x)
        return self.head(x.mean((2, 3)))


def main() -> None:
    args = parse_arguments()
    train = Images(args.data, "train", mirrored=True)
    test = Images(args.data, "t10k")
    num_steps = args.steps or int(args.epochs * len(train) / 2 / args.batch_size)
    blocks = [int(count) for count in args.blocks.split(",")]

    torch.manual_seed(args.seed)  # every worker builds the same model
    model = ResNet(args.width, blocks)
    optimizer = torch.optim.SGD(
        model.parameters(), lr=args.lr, momentum=0.9, nesterov=True, weight_decay=args.weight_decay
    )
    scheduler = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, args.lr, total_steps=num_steps + 1, pct_start=0.2, cycle_momentum=False
    )
    job = varuna.Varuna(
        model,
        optimizer,
        train,
        batch_size=args.batch_size,
        loss_fn=F.cross_entropy,
        lr_scheduler=scheduler,
        precision=args.precision,
        seed=args.seed,
    )
    if job.rank == 0:
        num_parameters = sum(parameter.numel() for parameter in model.parameters())
        say(f"{num_parameters / 1e6:.2f} M parameters, {num_steps} steps of {args.batch_size} images.")

    started_s = time.monotonic()
    losses = [step.loss for step in job.train(num_steps)]
    duration_s = time.monotonic() - started_s
    test_loss = job.evaluate(test, batch_size=250)

    weights = job.full_state_dict()  # on worker 0; empty on the others
    if job.rank != 0:
        return
    whole = ResNet(args.width, blocks).eval()
    whole.load_state_dict(weights)
    accuracy = accuracy_of(whole, test)
    args.save.mkdir(parents=True, exist_ok=True)
    save_model(whole, str(args.save / "model.safetensors"))
    summary = {
        "num_steps": num_steps,
        "duration_s": round(duration_s, 1),
        "images_per_s": round(num_steps * args.batch_size / duration_s),
        "accuracy": accuracy,
        "test_loss": test_loss,
        "train_losses": losses,
    }
    (args.save / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    say(f"{accuracy:.4f} of the 10,000 test images are right (loss {test_loss:.3f}), after {duration_s:.0f} s.")
    say(f"In {args.save.resolve()}: model.safetensors, summary.json.")


@torch.inference_mode()
def accuracy_of(model: nn.Module, images: Images) -> float:
    """Share of images whose highest score is that of their label."""
    right = sum(int((model(batch).argmax(-1) == labels).sum()) for batch, labels in images.batches(500))
    return right / len(images)


if __name__ == "__main__":
    main()
