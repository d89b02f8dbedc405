"""Small models, each for one kind of case, and their data."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import varuna

VOCAB = 11
WIDTH = 8
TIME = 6


class Rows(torch.utils.data.Dataset[Any]):
    """Sample i is the i-th row of every column, as a dict."""

    def __init__(self, columns: Mapping[str, Tensor]) -> None:
        self.columns = dict(columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: column[index] for name, column in self.columns.items()}


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def text(num_samples: int = 40, *, time: int = TIME) -> Rows:
    """Tokens and labels; of the labels between none and all but one are -100."""
    tokens = torch.randint(VOCAB, (num_samples, time), generator=generator(1))
    labels = torch.randint(VOCAB, (num_samples, time), generator=generator(2))
    num_valid = torch.randint(1, time + 1, (num_samples, 1), generator=generator(3))
    return Rows({"tokens": tokens, "labels": labels.masked_fill(torch.arange(time) >= num_valid, -100)})


def points(num_samples: int = 40) -> Rows:
    """Vectors and one target each."""
    x = torch.randn(num_samples, WIDTH, dtype=torch.float64, generator=generator(4))
    y = torch.randn(num_samples, dtype=torch.float64, generator=generator(5))
    return Rows({"x": x, "y": y})


class Tagger(nn.Module):
    """Tokens to labels, three blocks, a mark after each part. Head and embedding may be one matrix.

    ``states_weight``: returns ``varuna.Loss`` (sum over valid labels, their number), else their mean.
    """

    def __init__(self, *, states_weight: bool, tied: bool = False, dropout: float = 0.0) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, WIDTH)
        self.blocks = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.head = nn.Linear(WIDTH, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.drop = nn.Dropout(dropout)
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(4))
        self.states_weight = states_weight

    def forward(self, tokens: Tensor, labels: Tensor) -> Any:
        h = self.cuts[0](self.embed(tokens))
        for index, block in enumerate(self.blocks):
            h = self.cuts[index + 1](h + self.drop(torch.tanh(block(h))))
        logits, targets = self.head(h).flatten(0, 1), labels.flatten()
        if not self.states_weight:
            return F.cross_entropy(logits, targets, ignore_index=-100)
        total = F.cross_entropy(logits, targets, ignore_index=-100, reduction="sum")
        return varuna.Loss(sum=total, weight=(targets != -100).sum())


class OwnLoss(nn.Module):
    """Label smoothing plus distillation from a frozen teacher; the weight is the importance of the samples."""

    def __init__(self) -> None:
        super().__init__()
        self.student = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.teacher = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, importance: Tensor) -> varuna.Loss:
        h = x
        for layer, cut in zip(self.student, self.cuts, strict=True):
            h = cut(torch.tanh(layer(h)))
        smooth = F.cross_entropy(h, y, label_smoothing=0.1, reduction="none")
        known = F.softmax(self.teacher(x), -1)
        distilled = F.kl_div(F.log_softmax(h, -1), known, reduction="none").sum(-1)
        return varuna.Loss(sum=((smooth + 0.5 * distilled) * importance).sum(), weight=importance.sum())


def weighted_classes(num_samples: int = 40) -> Rows:
    x = torch.randn(num_samples, WIDTH, dtype=torch.float64, generator=generator(6))
    y = torch.randint(WIDTH, (num_samples,), generator=generator(7))
    importance = torch.rand(num_samples, dtype=torch.float64, generator=generator(8)) * 3
    return Rows({"x": x, "y": y, "importance": importance})


class Nest(nn.Module):
    """Four sections; ``outer`` is in the first and the last, ``inner`` in the middle two, ``wide`` in three."""

    TIED = ("outer_1.weight", "inner_1.weight", "wide_1.weight")

    def __init__(self) -> None:
        super().__init__()
        for name, count in (("outer", 2), ("inner", 2), ("wide", 3)):
            for index in range(1, count + 1):
                setattr(self, f"{name}_{index}", nn.Linear(WIDTH, WIDTH, bias=name == "inner"))
                getattr(self, f"{name}_{index}").weight = getattr(self, f"{name}_1").weight
        self.own = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.own[0](self.outer_1(x))) + self.wide_1(x)
        h = self.cuts[0](h)
        h = h + torch.tanh(self.own[1](self.inner_1(h))) + 0.3 * self.wide_2(h)
        h = self.cuts[1](h)
        h = h + torch.tanh(self.own[2](self.inner_2(h)))
        h = self.cuts[2](h)
        h = self.own[3](torch.tanh(self.outer_2(h))) + 0.3 * self.wide_3(h)
        return F.mse_loss(h.mean(-1), y)


class Norms(nn.Module):
    """BatchNorm in both halves, with different momentum, over ``[batch, WIDTH, 3]``."""

    def __init__(self) -> None:
        super().__init__()
        self.spread = nn.Linear(1, 3)
        self.norm_1, self.norm_2 = nn.BatchNorm1d(WIDTH), nn.BatchNorm1d(WIDTH, momentum=0.3)
        self.mix_1, self.mix_2 = nn.Conv1d(WIDTH, WIDTH, 1), nn.Conv1d(WIDTH, WIDTH, 1)
        self.cut = varuna.CutPoint()

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = torch.tanh(self.norm_1(self.mix_1(self.spread(x.unsqueeze(-1)))))
        h = self.cut(h)
        return F.mse_loss(self.norm_2(self.mix_2(h)).tanh().mean((1, 2)), y)


class Counts(nn.Module):
    """Row i of ``uses`` has gradient 1 for every time sample i is in the batch, so SGD counts what was used."""

    def __init__(self, num_samples: int) -> None:
        super().__init__()
        self.uses = nn.Embedding(num_samples, 1)
        self.offset = nn.Parameter(torch.zeros(1))
        nn.init.zeros_(self.uses.weight)
        self.cut = varuna.CutPoint()

    def forward(self, index: Tensor) -> varuna.Loss:
        h = self.cut(self.uses(index))
        return varuna.Loss(sum=-(h + 0 * self.offset).sum(), weight=1.0 * index.shape[0])


class Indices(torch.utils.data.Dataset[Any]):
    """Sample i is its own number."""

    def __init__(self, num_samples: int) -> None:
        self.num_samples = num_samples

    def __len__(self) -> int:
        return self.num_samples

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"index": torch.tensor(index)}


class Kinds(nn.Module):
    """Values of every kind jump over cuts: float, integer, boolean, a float without gradient."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.table = nn.Embedding(WIDTH, WIDTH)
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        h = self.layers[0](x)
        choice, positive, level = h.argmax(-1), h > 0, h.detach() * 0.1
        count = positive.sum(-1)
        h = self.cuts[0](torch.tanh(h))
        h = self.cuts[1](h + torch.tanh(self.layers[1](h)))
        h = torch.where(positive, h, 0.5 * h) + self.table(choice)
        h = self.cuts[2](torch.tanh(self.layers[2](h)) + level)
        h = self.layers[3](h) * (1 + count).unsqueeze(-1) + self.table(choice)
        return F.mse_loss(h.mean(-1), y)


class NoGradient(nn.Module):
    """The first part is frozen; a branch of the second crosses a cut and is used for a comparison only."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.layers[0].requires_grad_(False)
        self.side = nn.Linear(WIDTH, WIDTH)
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(3))

    def forward(self, x: Tensor, y: Tensor, valid: Tensor) -> varuna.Loss:
        h = self.cuts[0](torch.tanh(self.layers[0](x)))
        side = self.side(h)
        h = self.cuts[1](torch.tanh(self.layers[1](h)))
        h = self.cuts[2](torch.tanh(self.layers[2](h)))
        h = torch.where(side > 0, h, 0.5 * h)
        error = (self.layers[3](h).mean(-1) - y) ** 2
        return varuna.Loss(sum=(error * valid).sum(), weight=valid.sum())


class Overflow(nn.Module):
    """Forward is harmless; backward multiplies the gradient between second and first layer by ``gain``."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.third = (nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.cuts = nn.ModuleList(varuna.CutPoint() for _ in range(2))

    def forward(self, x: Tensor, y: Tensor, gain: Tensor) -> Tensor:
        h = self.first(x)
        wide = h.float()
        gain = gain.unsqueeze(-1)
        h = wide * gain - (wide * (gain - 1)).detach()  # the value is wide, to rounding
        h = self.cuts[0](torch.tanh(h))
        h = self.cuts[1](torch.tanh(self.second(h)))
        return F.mse_loss(self.third(h).float().mean(-1), y)
