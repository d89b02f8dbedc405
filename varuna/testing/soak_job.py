"""What a soak trains: a small model in fp64 with dropout, milliseconds a step. A script for `varuna run -m`.

``soak_job NUM_STEPS DIRECTORY``: no step begins whose index is not below the number in ``DIRECTORY/limit``;
worker 0 writes the final weights to ``DIRECTORY/state.safetensors``.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor, nn
from torch.nn import functional as F

import varuna

NUM_TOKENS, LENGTH, WIDTH, NUM_BLOCKS = 17, 6, 16, 4
NUM_SAMPLES, BATCH_SIZE = 96, 12
_POLL_S = 0.005


class Model(nn.Module):
    """Tokens to the next token: blocks with dropout, a tied head; what it returns is a mean over samples."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(NUM_TOKENS, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(NUM_BLOCKS))
        self.head = nn.Linear(WIDTH, NUM_TOKENS, bias=False)
        self.head.weight = self.embed.weight
        self.drop = nn.Dropout(0.2)
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(NUM_BLOCKS))

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """``tokens``, ``targets``: (samples, LENGTH)."""
        h = self.embed(tokens)
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            h = cut(h + self.drop(torch.tanh(block(h))))
        return F.cross_entropy(self.head(h).flatten(0, 1), targets.flatten())


def dataset() -> torch.utils.data.TensorDataset:
    """Random tokens and what follows them."""
    generator = torch.Generator().manual_seed(11)
    tokens = torch.randint(NUM_TOKENS, (NUM_SAMPLES, LENGTH + 1), generator=generator)
    return torch.utils.data.TensorDataset(tokens[:, :-1], tokens[:, 1:])


def main() -> None:
    """Train."""
    num_steps, directory = int(sys.argv[1]), Path(sys.argv[2])
    torch.manual_seed(5)
    model = Model().double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.998)
    job = varuna.Varuna(
        model,
        optimizer,
        dataset(),
        BATCH_SIZE,
        lr_scheduler=schedule,
        precision="fp64",
        clip_grad_norm=1.0,
        seed=3,
        device="cpu",
        progress=False,
    )
    _wait_for_leave(directory, 0)
    for _ in job.train(num_steps):
        if job.step_index < num_steps:
            _wait_for_leave(directory, job.step_index)
    state = job.full_state_dict()
    if job.rank == 0:
        tensors = {name: value.contiguous().clone() for name, value in state.items()}
        save_file(tensors, directory / "state.part")
        (directory / "state.part").rename(directory / "state.safetensors")
    job.close()


def _wait_for_leave(directory: Path, step_index: int) -> None:
    while step_index >= int((directory / "limit").read_text()):
        time.sleep(_POLL_S)


if __name__ == "__main__":
    main()
