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
from tests.exact import own_models

NUM_SAMPLES = 64
_TIME = 12


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
        return NUM_SAMPLES

    def __getitem__(self, index: int) -> Any:
        if isinstance(self.columns, tuple):
            return tuple(column[index] for column in self.columns)
        return {name: column[index] for name, column in self.columns.items()}


def _tokens(vocab: int, *, time: int = _TIME, low: int = 3) -> Tensor:
    return torch.randint(low, vocab, (NUM_SAMPLES, time))


def _language(vocab: int = 40) -> dict[str, Tensor]:
    return {"tokens": _tokens(vocab), "targets": _tokens(vocab)}


def _ragged_mask(time: int = _TIME) -> Tensor:
    """``[NUM_SAMPLES, time]``: each sample has between half and all of its positions."""
    lengths = torch.randint(time // 2, time + 1, (NUM_SAMPLES, 1))
    return torch.arange(time) < lengths


def _some_ignored(labels: Tensor) -> Tensor:
    ignored = torch.rand(labels.shape) < 0.3
    ignored[:, 1] = False
    return labels.masked_fill(ignored, -100)


def _mark(plain: bool) -> Callable[[], nn.Module]:
    return nn.Identity if plain else varuna.CutPoint


# --- Hugging Face ---------------------------------------------------------------------------


def _gpt2(plain: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=4, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def _gpt2_columns() -> dict[str, Tensor]:
    tokens = _tokens(40)
    return {"input_ids": tokens, "labels": _some_ignored(tokens)}


def _bert(plain: bool) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForPreTraining(config)


def _bert_columns() -> dict[str, Tensor]:
    tokens = _tokens(40)
    return {
        "input_ids": tokens,
        "attention_mask": _ragged_mask().long(),
        "token_type_ids": torch.randint(0, 2, (NUM_SAMPLES, _TIME)),
        "labels": _some_ignored(tokens),
        "next_sentence_label": torch.randint(0, 2, (NUM_SAMPLES,)),
    }


def _llama(plain: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def _causal_columns() -> dict[str, Tensor]:
    tokens = _tokens(40)
    return {"input_ids": tokens, "attention_mask": _ragged_mask().long(), "labels": tokens.clone()}


def _t5(plain: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def _t5_columns() -> dict[str, Tensor]:
    return {
        "input_ids": _tokens(40),
        "attention_mask": _ragged_mask().long(),
        "labels": _some_ignored(_tokens(40, time=7)),
    }


def _vit(plain: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=8,
        patch_size=4, num_channels=3, num_labels=5, problem_type="single_label_classification",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def _vit_columns() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(NUM_SAMPLES, 3, 8, 8), "labels": torch.randint(0, 5, (NUM_SAMPLES,))}


def _whisper(plain: bool) -> nn.Module:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=40, num_mel_bins=8, d_model=32, encoder_layers=3, decoder_layers=3,
        encoder_attention_heads=4, decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48,
        max_source_positions=8, max_target_positions=16, dropout=0.0, attention_dropout=0.0,
        activation_dropout=0.0, encoder_layerdrop=0.0, decoder_layerdrop=0.0, use_cache=False,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, decoder_start_token_id=1,
        suppress_tokens=None, begin_suppress_tokens=None,
    )  # fmt: skip
    return WhisperForConditionalGeneration(config)


def _whisper_columns() -> dict[str, Tensor]:
    return {"input_features": torch.randn(NUM_SAMPLES, 8, 16), "labels": _some_ignored(_tokens(40, time=7))}


def _mixtral(experts: str) -> Callable[[bool], nn.Module]:
    def build(plain: bool) -> nn.Module:
        from transformers import MixtralConfig, MixtralForCausalLM

        config = MixtralConfig(
            vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
            num_key_value_heads=2, num_local_experts=4, num_experts_per_tok=2, max_position_embeddings=16,
            output_router_logits=True, router_aux_loss_coef=0.01, use_cache=False,
            experts_implementation=experts,
        )  # fmt: skip
        return MixtralForCausalLM(config)

    return build


# --- own ------------------------------------------------------------------------------------


def _token_weighted(plain: bool) -> nn.Module:
    return own_models.TokenWeighted(_mark(plain), PlainLoss if plain else varuna.Loss)


def _ignoring_language() -> dict[str, Tensor]:
    return {"tokens": _tokens(40), "targets": _some_ignored(_tokens(40))}


def _images() -> dict[str, Tensor]:
    return {"images": torch.randn(NUM_SAMPLES, 3, 8, 8), "labels": torch.randint(0, 5, (NUM_SAMPLES,))}


def _points() -> tuple[Tensor, ...]:
    return torch.randn(NUM_SAMPLES, 16), torch.randint(0, 5, (NUM_SAMPLES,))


def _skips_columns() -> dict[str, Tensor]:
    return {
        "tokens": _tokens(30),
        "labels": _tokens(30),
        "mask": _ragged_mask(),
        "segments": torch.randint(0, 4, (NUM_SAMPLES, _TIME)),
    }


def _with_constants(samples: list[dict[str, Tensor]]) -> dict[str, Any]:
    """The user's collate function: adds an input that is None and one that is a number."""
    return {**torch.utils.data.default_collate(samples), "extra": None, "scale": 0.5}


def _labelled(vocab: int = 30) -> dict[str, Tensor]:
    return {"tokens": _tokens(vocab), "labels": _tokens(vocab)}


CASES: Sequence[ModelCase] = (
    ModelCase(name="gpt", build=lambda plain: own_models.GPT(_mark(plain)), columns=_language),
    ModelCase(name="token_weighted", build=_token_weighted, columns=_ignoring_language),
    ModelCase(name="gpt2", build=_gpt2, columns=_gpt2_columns),
    ModelCase(name="bert", build=_bert, columns=_bert_columns),
    ModelCase(name="llama", build=_llama, columns=_causal_columns),
    ModelCase(name="t5", build=_t5, columns=_t5_columns),
    ModelCase(name="vit", build=_vit, columns=_vit_columns),
    ModelCase(name="whisper", build=_whisper, columns=_whisper_columns),
    ModelCase(
        name="mixtral_grouped",
        build=_mixtral("grouped_mm"),
        columns=_causal_columns,
        dtype=torch.float32,
        bound=2e-5,  # rounding in fp32 through five steps of AdamW: about 6e-6; wrong sums give 1e-2
    ),
    ModelCase(name="mixtral_eager", build=_mixtral("eager"), columns=_causal_columns),
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
