"""The GPT of the benchmarks: about 10 M parameters, byte-level tokens, one mark in the middle."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from varuna import CutPoint

VOCABULARY, WIDTH, HEADS, LAYERS, TIME = 256, 320, 5, 8, 64


class Block(nn.Module):
    """Causal self-attention and an MLP over ``[batch, time, width]``."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        """``[batch, time, width]`` to the same."""
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, time, 3, HEADS, width // HEADS).unbind(2)
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True
        )
        x = x + self.out(y.transpose(1, 2).reshape(batch, time, width))
        return x + self.down(F.gelu(self.up(self.norm_2(x))))


class First(nn.Module):
    """Embeddings and the first half of the blocks: ``[batch, time] -> [batch, time, width]``."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(TIME, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))

    def forward(self, tokens: Tensor) -> Tensor:
        """Token ids to hidden states."""
        h = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        for block in self.blocks:
            h = block(h)
        return h


class Last(nn.Module):
    """The other half and the head: ``[batch, time, width] -> [batch, time, vocabulary]``."""

    def __init__(self, num_blocks: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(num_blocks))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        """Hidden states to logits."""
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h))


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross entropy."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


class GPT(nn.Module):
    """Both halves with the loss: what a user writes."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.cut, self.last = First(LAYERS // 2), CutPoint(), Last(LAYERS // 2)

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        """``[batch, time]`` each, to a scalar."""
        return loss_of(self.last(self.cut(self.first(tokens))), targets)


class Text(torch.utils.data.Dataset[dict[str, Tensor]]):
    """Random bytes, in memory: reading costs both sides next to nothing."""

    def __init__(self, num_samples: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.bytes = torch.randint(0, VOCABULARY, (num_samples, TIME + 1), generator=generator)

    def __len__(self) -> int:
        return len(self.bytes)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        """Tokens and the tokens that follow them."""
        row = self.bytes[index]
        return {"tokens": row[:-1], "targets": row[1:]}


def build() -> GPT:
    """The model, with the same weights every time."""
    torch.manual_seed(0)
    return GPT()
