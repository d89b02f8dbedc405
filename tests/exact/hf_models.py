"""Hugging Face models of the exactness tests, tiny and from their configuration alone, with their inputs.

The argument of every builder says whether the plain loop asks; these models are the same for both.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from tests.exact.columns import NUM_SAMPLES, TIME, ragged_mask, random_tokens, some_ignored


def gpt2(plain: bool) -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=40, n_positions=16, n_embd=32, n_layer=4, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip
    return GPT2LMHeadModel(config)


def gpt2_columns() -> dict[str, Tensor]:
    tokens = random_tokens(40)
    return {"input_ids": tokens, "labels": some_ignored(tokens)}


def bert(plain: bool) -> nn.Module:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=40, hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=64,
        max_position_embeddings=16, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return BertForPreTraining(config)


def bert_columns() -> dict[str, Tensor]:
    tokens = random_tokens(40)
    return {
        "input_ids": tokens,
        "attention_mask": ragged_mask().long(),
        "token_type_ids": torch.randint(0, 2, (NUM_SAMPLES, TIME)),
        "labels": some_ignored(tokens),
        "next_sentence_label": torch.randint(0, 2, (NUM_SAMPLES,)),
    }


def llama(plain: bool) -> nn.Module:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=40, hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, use_cache=False,
    )  # fmt: skip
    return LlamaForCausalLM(config)


def causal_columns() -> dict[str, Tensor]:
    tokens = random_tokens(40)
    return {"input_ids": tokens, "attention_mask": ragged_mask().long(), "labels": tokens.clone()}


def t5(plain: bool) -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40, d_model=32, d_kv=8, d_ff=48, num_layers=3, num_decoder_layers=3, num_heads=4,
        dropout_rate=0.0, use_cache=False, decoder_start_token_id=0, pad_token_id=0,
    )  # fmt: skip
    return T5ForConditionalGeneration(config)


def t5_columns() -> dict[str, Tensor]:
    return {
        "input_ids": random_tokens(40),
        "attention_mask": ragged_mask().long(),
        "labels": some_ignored(random_tokens(40, time=7)),
    }


def vit(plain: bool) -> nn.Module:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32, num_hidden_layers=4, num_attention_heads=4, intermediate_size=48, image_size=8,
        patch_size=4, num_channels=3, num_labels=5, problem_type="single_label_classification",
        hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0,
    )  # fmt: skip
    return ViTForImageClassification(config)


def vit_columns() -> dict[str, Tensor]:
    return {"pixel_values": torch.randn(NUM_SAMPLES, 3, 8, 8), "labels": torch.randint(0, 5, (NUM_SAMPLES,))}


def whisper(plain: bool) -> nn.Module:
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


def whisper_columns() -> dict[str, Tensor]:
    return {
        "input_features": torch.randn(NUM_SAMPLES, 8, 16),
        "labels": some_ignored(random_tokens(40, time=7)),
    }


def mixtral(experts: str) -> Callable[[bool], nn.Module]:
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
