"""Small random models of the kinds that capture must handle, and batches for them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from varuna.partition.cutpoint import CutPoint
from varuna.partition.graph import CapturedGraph, executable
from varuna.partition.loss import loss_of, read_output
from varuna.partition.signature import call_arguments, flatten_batch
from varuna.run.precision import AutocastSpec

VOCABULARY = 61
LENGTH = 7


def tokens(num_samples: int, length: int = LENGTH) -> Tensor:
    return torch.randint(1, VOCABULARY, (num_samples, length))


def _gpt2() -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import GPT2Config, GPT2LMHeadModel

    config = GPT2Config(
        vocab_size=VOCABULARY,
        n_positions=16,
        n_embd=32,
        n_layer=2,
        n_head=2,
        use_cache=False,
    )
    return GPT2LMHeadModel(config), _causal


def _causal(n: int) -> dict[str, Tensor]:
    ids = tokens(n)
    return {"input_ids": ids, "labels": ids.clone()}


def _bert() -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import BertConfig, BertForPreTraining

    config = BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=64,
        max_position_embeddings=16,
    )

    def batch(n: int) -> dict[str, Tensor]:
        mask = torch.ones(n, LENGTH, dtype=torch.int64)
        mask[0, -2:] = 0
        return {
            "input_ids": tokens(n),
            "attention_mask": mask,
            "labels": tokens(n),
            "next_sentence_label": torch.randint(0, 2, (n,)),
        }

    return BertForPreTraining(config), batch


def _llama() -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=16,
        use_cache=False,
        attention_dropout=0.1,
    )
    return LlamaForCausalLM(config), _causal


def _t5() -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=VOCABULARY,
        d_model=32,
        d_kv=16,
        d_ff=48,
        num_layers=2,
        num_heads=2,
        use_cache=False,
        decoder_start_token_id=0,
    )
    return T5ForConditionalGeneration(config), lambda n: {"input_ids": tokens(n), "labels": tokens(n, 5)}


def _vit() -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import ViTConfig, ViTForImageClassification

    config = ViTConfig(
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=48,
        image_size=16,
        patch_size=8,
        hidden_dropout_prob=0.1,
        attention_probs_dropout_prob=0.1,
        num_labels=3,
    )
    model = ViTForImageClassification(config)
    return model, lambda n: {
        "pixel_values": torch.randn(n, 3, 16, 16, dtype=next(model.parameters()).dtype),
        "labels": torch.randint(0, 3, (n,)),
    }


def whisper(layerdrop: float = 0.0) -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import WhisperConfig, WhisperForConditionalGeneration

    config = WhisperConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=2,
        decoder_layers=2,
        encoder_attention_heads=2,
        decoder_attention_heads=2,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        num_mel_bins=8,
        max_source_positions=10,
        max_target_positions=12,
        encoder_layerdrop=layerdrop,
        decoder_layerdrop=layerdrop,
        use_cache=False,
        pad_token_id=0,
        bos_token_id=1,
        eos_token_id=2,
        decoder_start_token_id=1,
        dropout=0.1,
    )
    model = WhisperForConditionalGeneration(config)
    return model, lambda n: {
        "input_features": torch.randn(n, 8, 20, dtype=next(model.parameters()).dtype),
        "labels": tokens(n),
    }


def _mixtral(experts: str) -> tuple[nn.Module, Callable[[int], Any]]:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        num_local_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=16,
        use_cache=False,
        output_router_logits=True,
    )
    config._experts_implementation = experts
    return MixtralForCausalLM(config), _causal


MODELS: dict[str, Callable[[], tuple[nn.Module, Callable[[int], Any]]]] = {
    "gpt2": _gpt2,
    "bert": _bert,
    "llama": _llama,
    "t5": _t5,
    "vit": _vit,
    "whisper": whisper,
    "mixtral-grouped": lambda: _mixtral("grouped_mm"),
    "mixtral-eager": lambda: _mixtral("eager"),
}


class Block(nn.Module):
    """A residual block with a mark, batch norm, dropout and a region without gradients."""

    def __init__(self, width: int, dropout: float) -> None:
        super().__init__()
        self.linear = nn.Linear(width, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.cut = CutPoint()

    def forward(self, x: Tensor) -> Tensor:
        h = self.dropout(self.norm(self.linear(x)))
        with torch.no_grad():
            scale = x.abs().mean()
        return self.cut(x + h * scale)


class Own(nn.Module):
    """Tied weights, a buffer changed in place, a plain tensor, tensors made in forward, optional inputs."""

    def __init__(self, width: int = 8, dropout: float = 0.1) -> None:
        super().__init__()
        self.embedding = nn.Embedding(VOCABULARY, width)
        self.blocks = nn.ModuleList(Block(width, dropout) for _ in range(2))
        self.head = nn.Linear(width, VOCABULARY, bias=False)
        self.head.weight = self.embedding.weight
        self.register_buffer("calls", torch.zeros(()))
        self.offset = torch.arange(float(width))

    def forward(self, x: Tensor, y: Tensor, mask: Tensor | None = None, shift: bool = False) -> Tensor:
        self.calls.add_(1)
        h = self.embedding(x) + self.offset + torch.arange(self.offset.numel(), device=x.device)
        for block in self.blocks:
            h = block(h)
        if mask is not None:
            h = h * mask[:, None]
        if shift:
            h = h + 1
        return nn.functional.cross_entropy(self.head(h), y)


def own_batch(n: int) -> dict[str, Any]:
    x = torch.randint(0, VOCABULARY, (n,))
    return {"x": x, "y": x.flip(0), "mask": None, "shift": True}


def loss_and_gradients(model: nn.Module, loss: Callable[[], Tensor]) -> tuple[Tensor, dict[str, Tensor | None]]:
    """Loss and gradients of one backward pass, random numbers from a fixed seed."""
    model.zero_grad(set_to_none=True)
    torch.manual_seed(7)
    value = loss()
    value.backward()
    return value.detach(), {name: parameter.grad for name, parameter in model.named_parameters()}


def assert_same_gradients(
    model: nn.Module, graph: CapturedGraph, batch: Any, bound: float = 0.0, autocast: AutocastSpec | None = None
) -> None:
    """The captured graph gives the same loss and gradients as the model itself for this batch."""
    flat = flatten_batch(batch)
    args, kwargs = call_arguments(flat.tree, flat.tensors)
    run = executable(graph, model)
    context = autocast.context if autocast is not None else contextlib.nullcontext
    buffers = {name: value.clone() for name, value in model.named_buffers()}

    def eager() -> Tensor:
        with context():
            return read_output(model(*args, **kwargs))[1][0]

    def captured() -> Tensor:
        with context():
            return loss_of(graph.output_spec, run(*[flat.tensors[key] for key in graph.input_keys]), 1).sum

    want, want_gradients = loss_and_gradients(model, eager)
    want_buffers = {name: value.clone() for name, value in model.named_buffers()}
    with torch.no_grad():
        for name, value in model.named_buffers():
            value.copy_(buffers[name])
    got, got_gradients = loss_and_gradients(model, captured)
    assert abs(float(want - got)) <= bound
    for name, gradient in want_gradients.items():
        if gradient is None:
            assert got_gradients[name] is None, name
            continue
        assert got_gradients[name] is not None, name
        assert float((gradient - got_gradients[name]).abs().max()) <= bound, name
    for name, value in model.named_buffers():
        assert torch.equal(value, want_buffers[name]), name


def without_dropout(model: nn.Module) -> nn.Module:
    for module in model.modules():
        for name, value in list(vars(module).items()):
            if isinstance(value, float) and (
                "dropout" in name or (name == "p" and isinstance(module, nn.Dropout))
            ):
                setattr(module, name, 0.0)
    return model
