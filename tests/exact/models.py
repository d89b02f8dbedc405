"""The zoo of the exactness tests: tiny models of every kind, built the same way in every process.

A case builds its model in fp64 (unless it says otherwise) from a fixed seed; every parameter that starts as a
constant is moved off it, so that no tensor consists of rounding errors alone.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

import varuna
from tests.exact import columns, hf_models, own_models


class PlainLoss(NamedTuple):
    """What a model with a stated weight returns in the plain loop."""

    sum: Tensor
    weight: Tensor


@dataclass(frozen=True, kw_only=True)
class ModelCase:
    """One model with its data.

    Attributes:
        name: what the test is called.
        build: makes the model; the argument is True for the plain loop (no Varuna inside).
        columns: makes the data, one tensor of ``[NUM_SAMPLES, ...]`` per input.
        options: further arguments of ``varuna.Varuna``.
        loss_fn: ``loss_fn(output, *rest_of_batch)`` where forward takes the first input and returns no loss.
        collate: the user's collate function, or None for the default.
        dtype: parameters' and computation's.
        bound: largest relative difference per tensor that is allowed.
        random: dropout is on, so that only Varuna's own runs can be compared with one another.
    """

    name: str
    build: Callable[[bool], nn.Module]
    columns: Callable[[], dict[str, Tensor] | tuple[Tensor, ...]]
    options: dict[str, Any] = field(default_factory=dict)
    loss_fn: Callable[..., Tensor] | None = None
    collate: Callable[[list[Any]], Any] | None = None
    dtype: torch.dtype = torch.float64
    bound: float = 1e-12
    random: bool = False

    @property
    def precision(self) -> str:
        """Varuna's name for the dtype."""
        return {torch.float64: "fp64", torch.float32: "fp32"}[self.dtype]

    def model(self, *, plain: bool) -> nn.Module:
        """The model in training mode, equal in every process."""
        torch.manual_seed(7)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            model = self.build(plain).to(self.dtype).train()
        finally:
            torch.set_default_dtype(before)
        with torch.no_grad():
            for parameter in model.parameters():
                if bool((parameter == parameter.flatten()[0]).all()):
                    parameter.add_(0.05 * torch.randn(parameter.shape, dtype=self.dtype))
        return model

    def dataset(self) -> Samples:
        """``NUM_SAMPLES`` samples, equal in every process."""
        torch.manual_seed(11)
        before = torch.get_default_dtype()
        torch.set_default_dtype(self.dtype)
        try:
            return Samples(self.columns())
        finally:
            torch.set_default_dtype(before)


class Samples(torch.utils.data.Dataset[Any]):
    """Map-style: sample i is the i-th row of every column, as a dict or a tuple."""

    def __init__(self, columns: dict[str, Tensor] | tuple[Tensor, ...]) -> None:
        self.columns = columns

    def __len__(self) -> int:
        return columns.NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, tuple):
            return tuple(column[index] for column in self.columns)
        return {name: column[index] for name, column in self.columns.items()}


def _language(vocab: int = 40) -> dict[str, Tensor]:
    return {"tokens": columns.random_tokens(vocab), "targets": columns.random_tokens(vocab)}


def _mark(plain: bool) -> Callable[[], nn.Module]:
    return nn.Identity if plain else varuna.CutPoint


# --- own ------------------------------------------------------------------------------------


def _token_weighted(plain: bool) -> nn.Module:
    return own_models.TokenWeighted(_mark(plain), PlainLoss if plain else varuna.Loss)


def _ignoring_language() -> dict[str, Tensor]:
    return {"tokens": columns.random_tokens(40), "targets": columns.some_ignored(columns.random_tokens(40))}


def _images() -> dict[str, Tensor]:
    return {
        "images": torch.randn(columns.NUM_SAMPLES, 3, 8, 8),
        "labels": torch.randint(0, 5, (columns.NUM_SAMPLES,)),
    }


def _points() -> tuple[Tensor, ...]:
    return torch.randn(columns.NUM_SAMPLES, 16), torch.randint(0, 5, (columns.NUM_SAMPLES,))


def _skips_columns() -> dict[str, Tensor]:
    return {
        "tokens": columns.random_tokens(30),
        "labels": columns.random_tokens(30),
        "mask": columns.ragged_mask(),
        "segments": torch.randint(0, 4, (columns.NUM_SAMPLES, columns.TIME)),
    }


def _with_constants(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The user's collate function: adds an input that is None and one that is a number."""
    return {**torch.utils.data.default_collate(samples), "extra": None, "scale": 0.5}


def _labelled(vocab: int = 30) -> dict[str, Tensor]:
    return {"tokens": columns.random_tokens(vocab), "labels": columns.random_tokens(vocab)}


CASES: Sequence[ModelCase] = (
    ModelCase(name="gpt", build=lambda plain: own_models.GPT(_mark(plain)), columns=_language),
    ModelCase(name="token_weighted", build=_token_weighted, columns=_ignoring_language),
    ModelCase(name="gpt2", build=hf_models.gpt2, columns=hf_models.gpt2_columns),
    ModelCase(name="bert", build=hf_models.bert, columns=hf_models.bert_columns),
    ModelCase(name="llama", build=hf_models.llama, columns=hf_models.causal_columns),
    ModelCase(name="t5", build=hf_models.t5, columns=hf_models.t5_columns),
    ModelCase(name="vit", build=hf_models.vit, columns=hf_models.vit_columns),
    ModelCase(name="whisper", build=hf_models.whisper, columns=hf_models.whisper_columns),
    ModelCase(
        name="mixtral_grouped",
        build=hf_models.mixtral("grouped_mm"),
        columns=hf_models.causal_columns,
        dtype=torch.float32,
        bound=2e-5,  # rounding in fp32 through five steps of AdamW: about 6e-6; wrong sums give 1e-2
    ),
    ModelCase(name="mixtral_eager", build=hf_models.mixtral("eager"), columns=hf_models.causal_columns),
    ModelCase(name="resnet", build=lambda plain: own_models.ResNet(), columns=_images),
    ModelCase(
        name="sequential",
        build=lambda plain: own_models.sequential(),
        columns=_points,
        loss_fn=nn.functional.cross_entropy,
    ),
    ModelCase(
        name="skips",
        build=lambda plain: own_models.Skips(_mark(plain)),
        columns=_skips_columns,
        collate=_with_constants,
    ),
    ModelCase(name="ties", build=lambda plain: own_models.Ties(_mark(plain)), columns=_labelled),
    ModelCase(
        name="dropout",
        build=lambda plain: own_models.GPT(_mark(plain), dropout=0.2),
        columns=_language,
        random=True,
    ),
)


def case(name: str) -> ModelCase:
    """The case of that name."""
    return next(one for one in CASES if one.name == name)
