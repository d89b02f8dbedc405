"""Small models written for the exactness tests: marks, skips, ties, buffers, dropout.

``cut`` is the class of the marks: ``varuna.CutPoint`` for Varuna's run, ``nn.Identity`` for the plain loop.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Mark = Callable[[], nn.Module]


class Block(nn.Module):
    """A causal transformer block over ``[batch, time, width]``."""

    def __init__(self, width: int, heads: int, dropout: float) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm_1, self.norm_2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)
        self.drop = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, width = x.shape
        q, k, v = self.qkv(self.norm_1(x)).view(batch, time, 3, self.heads, width // self.heads).unbind(2)
        p = self.dropout if self.training else 0.0
        y = F.scaled_dot_product_attention(
            q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2), is_causal=True, dropout_p=p
        )
        x = x + self.drop(self.out(y.transpose(1, 2).reshape(batch, time, width)))
        return x + self.drop(self.down(F.gelu(self.up(self.norm_2(x)))))


class GPT(nn.Module):
    """Language model with a mark after every block; returns the mean cross entropy."""

    def __init__(
        self, cut: Mark, *, vocab: int = 40, width: int = 32, time: int = 12, dropout: float = 0.0
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocab, width), nn.Embedding(time, width)
        self.drop = nn.Dropout(dropout)
        self.blocks = nn.ModuleList(Block(width, 4, dropout) for _ in range(5))
        self.cuts = nn.ModuleList(cut() for _ in range(5))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, vocab, bias=False)
        nn.init.normal_(self.tokens.weight, std=0.1)
        self.head.weight = self.tokens.weight

    def forward(self, tokens: Tensor, targets: Tensor) -> Tensor:
        h = self.drop(self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1], device=tokens.device)))
        for block, cut in zip(self.blocks, self.cuts, strict=True):
            h = cut(block(h))
        return F.cross_entropy(self.head(self.norm(h)).flatten(0, 1), targets.flatten())


class TokenWeighted(nn.Module):
    """The GPT with a stated sum and weight, ``loss_type(sum=, weight=)``: labels of -100 do not count."""

    def __init__(self, cut: Mark, loss_type: Callable[..., Any]) -> None:
        super().__init__()
        self.gpt, self.loss_type = GPT(cut), loss_type

    def forward(self, tokens: Tensor, targets: Tensor) -> Any:
        gpt = self.gpt
        h = gpt.tokens(tokens) + gpt.positions.weight[: tokens.shape[1]]
        for block, cut in zip(gpt.blocks, gpt.cuts, strict=True):
            h = cut(block(h))
        logits = gpt.head(gpt.norm(h)).flatten(0, 1)
        total = F.cross_entropy(logits, targets.flatten(), ignore_index=-100, reduction="sum")
        return self.loss_type(sum=total, weight=(targets != -100).sum())


class ResidualConv(nn.Module):
    """Convolutions and BatchNorm with a shortcut over ``[batch, channels, height, width]``."""

    def __init__(self, inputs: int, outputs: int, stride: int) -> None:
        super().__init__()
        self.conv_1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
        self.norm_1 = nn.BatchNorm2d(outputs)
        self.conv_2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
        self.norm_2 = nn.BatchNorm2d(outputs, momentum=0.2)
        self.short = nn.Conv2d(inputs, outputs, 1, stride, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y = F.relu(self.norm_1(self.conv_1(x)))
        return F.relu(self.norm_2(self.conv_2(y)) + self.short(x))


class ResNet(nn.Module):
    """Image classifier with BatchNorm; found cut points."""

    def __init__(self, classes: int = 5) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU())
        shapes = [(8, 8, 1), (8, 16, 2), (16, 16, 1), (16, 32, 2), (32, 32, 1)]
        self.layers = nn.ModuleList(ResidualConv(*shape) for shape in shapes)
        self.head = nn.Linear(32, classes)

    def forward(self, images: Tensor, labels: Tensor) -> Tensor:
        h = self.stem(images)
        for layer in self.layers:
            h = layer(h)
        return F.cross_entropy(self.head(h.mean((2, 3))), labels)


class Skips(nn.Module):
    """Keyword inputs, None, masks; float, integer and boolean values that jump over several cuts."""

    def __init__(self, cut: Mark, *, vocab: int = 30, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.side = nn.Embedding(width, width)
        self.steps = nn.ModuleList(nn.Linear(width, width) for _ in range(5))
        self.gates = nn.ModuleList(nn.Linear(2 * width, width) for _ in range(5))
        self.cuts = nn.ModuleList(cut() for _ in range(5))
        self.head = nn.Linear(width, vocab)

    def forward(
        self,
        tokens: Tensor,
        *,
        labels: Tensor,
        mask: Tensor | None = None,
        extra: Tensor | None = None,
        segments: Tensor | None = None,
        scale: float = 1.0,
    ) -> dict[str, Tensor]:
        h = self.embed(tokens) * scale
        first, choice, positive = h, h.argmax(-1), h > 0
        if extra is not None:
            h = h + extra
        for index, (step, gate, cut) in enumerate(zip(self.steps, self.gates, self.cuts, strict=True)):
            h = torch.tanh(step(h)) + torch.sigmoid(gate(torch.cat([h, first], -1)))
            if mask is not None:
                h = h.masked_fill(~mask.unsqueeze(-1), 0.0)
            if index == 2 and segments is not None:
                h = h + self.side(segments)
            if index == 3:
                h = torch.where(positive, h, 0.5 * h) + self.side(choice)
            h = cut(h)
        return {"loss": F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten()), "logits": h}


class Inner(nn.Module):
    def __init__(self, width: int, vocab: int) -> None:
        super().__init__()
        self.again = nn.Embedding(vocab, width)
        self.down, self.up = nn.Linear(width, width), nn.Linear(width, width)


class Ties(nn.Module):
    """One matrix under four names at three depths, a second tie; frozen, unused, gradient-free parameters."""

    def __init__(self, cut: Mark, *, vocab: int = 30, width: int = 32) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, width)
        self.middle = nn.ModuleDict({"deep": nn.ModuleList([Inner(width, vocab), Inner(width, vocab)])})
        self.frozen = nn.Linear(width, width)
        self.frozen.requires_grad_(False)
        self.unused = nn.Parameter(torch.randn(7))
        self.threshold = nn.Parameter(torch.zeros(width))
        self.out = nn.Linear(width, width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.cuts = nn.ModuleList(cut() for _ in range(4))
        nn.init.normal_(self.embed.weight, std=0.1)
        first, second = self.middle["deep"]
        self.head.weight = first.again.weight = second.again.weight = self.embed.weight
        self.out.weight = first.down.weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Tensor:
        h = self.cuts[0](self.embed(tokens))
        for index, inner in enumerate(self.middle["deep"]):
            h = h + inner.up(torch.tanh(inner.down(h))) + inner.again(tokens)
            h = self.cuts[index + 1](h)
        h = h + self.frozen(h) * (h > self.threshold).to(h.dtype)
        h = self.cuts[3](torch.tanh(self.out(h)))
        return F.cross_entropy(self.head(h).flatten(0, 1), labels.flatten())


def sequential(width: int = 16, classes: int = 5) -> nn.Sequential:
    """Six parts, ``[batch, width] -> [batch, classes]``; the loss comes from outside."""
    layers = [nn.Sequential(nn.Linear(width, width), nn.Tanh(), nn.LayerNorm(width)) for _ in range(5)]
    return nn.Sequential(*layers, nn.Linear(width, classes))
