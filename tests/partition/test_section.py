"""Sections across captures: evaluation, other shapes, Hugging Face models, opaque leaves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.partition.split_support import GPT, assert_same_step, language_batch
from varuna.errors import CutPointError
from varuna.partition import partition, signature_of


def _evaluate(divided: Any, batch: dict[str, Tensor]) -> Tensor:
    values: tuple[Tensor, ...] = ()
    with torch.no_grad():
        for section in divided.sections:
            values = section.run(batch, values)
    return values[0]


def test_evaluation_is_cut_where_training_is() -> None:
    model = GPT(dropout=0.2).double()
    training = partition(model, language_batch(2))
    evaluated = partition(model, language_batch(2), training=False, like=training)
    assert len(training.sections) > 3
    for one, other in zip(training.sections, evaluated.sections, strict=True):
        assert list(one.parameters) == list(other.parameters)
    batch = language_batch(3)
    model.eval()
    torch.testing.assert_close(_evaluate(evaluated, batch), model(**batch).detach(), rtol=1e-12, atol=0)


def test_another_length_is_cut_where_the_first_was() -> None:
    model = GPT().double()
    first = partition(model, language_batch(2), cut_points=["blocks.0", "blocks.1"])
    shorter = partition(model, signature_of(language_batch(2, time=5)), like=first)
    assert shorter.digest != first.digest
    for one, other in zip(first.sections, shorter.sections, strict=True):
        assert list(one.parameters) == list(other.parameters)
    assert_same_step(model, shorter, language_batch(3, time=5))


class Swapped(nn.Module):
    """Uses its two layers in another order in eval mode."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        first, second = (self.a, self.b) if self.training else (self.b, self.a)
        return second(torch.tanh(first(x))).square().mean()


def test_another_order_of_parameters_is_an_error_that_names_the_section() -> None:
    batch = {"x": torch.randn(2, 4)}
    training = partition(Swapped(), batch, cut_points=["a"])
    with pytest.raises(CutPointError, match=r"section [01] \([ab]\)"):
        partition(Swapped(), batch, training=False, like=training)


class Chooses(nn.Module):
    """Data-dependent inside: becomes an opaque leaf."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.norm, self.drop = nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Dropout(0.5)

    def forward(self, x: Tensor) -> Tensor:
        h = self.drop(self.norm(x))
        return self.inner(h) if float(x.sum()) > 1e9 else 2.0 * self.inner(h)


class WithLeaf(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.leaf, self.last = nn.Linear(4, 4), Chooses(), nn.Linear(4, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.tanh(self.leaf(torch.tanh(self.first(x))))).square().mean()


def test_an_opaque_leaf_trains_keeps_its_buffers_and_evaluates() -> None:
    model = WithLeaf().double()
    batch = {"x": torch.randn(3, 4).double()}
    divided = partition(model, batch, cut_points=["first", "leaf"])
    middle = divided.sections[1]
    assert middle.uses_random
    assert set(middle.parameters) == {f"leaf.{name}" for name, _ in model.leaf.named_parameters()}
    assert middle.mutated_buffers["leaf.norm.running_mean"].kind == "affine"
    assert_same_step(model, divided, batch)
    before = model.leaf.norm.running_mean.clone()
    values = divided.sections[0].run(batch, ())
    with middle.preserve_buffers():
        middle.run(batch, values)
    assert torch.equal(model.leaf.norm.running_mean, before)
    middle.run(batch, values)
    assert not torch.equal(model.leaf.norm.running_mean, before)
    evaluated = partition(model, batch, training=False, like=divided)
    before = model.leaf.norm.running_mean.clone()
    found = _evaluate(evaluated, batch)
    assert torch.equal(model.leaf.norm.running_mean, before)
    assert model.leaf.training
    model.eval()
    torch.testing.assert_close(found, model(**batch).detach(), rtol=1e-12, atol=0)


def test_a_capture_from_the_cache_gives_the_same_partition(tmp_path: Any) -> None:
    model = GPT(dropout=0.1).double()
    first = partition(model, language_batch(2), cache_dir=tmp_path)
    second = partition(model, language_batch(2), cache_dir=tmp_path)
    assert (first.from_cache, second.from_cache) == (False, True)
    assert second.digest == first.digest
    assert_same_step(model, second, language_batch(3))


def test_a_model_on_the_meta_device_is_divided_alike() -> None:
    with torch.device("meta"):
        empty = GPT()
    digests = {partition(model, language_batch(2)).digest for model in (empty, GPT())}
    assert len(digests) == 1


# --- Hugging Face ---------------------------------------------------------------------------


def _gpt2() -> nn.Module:
    from transformers import GPT2Config, GPT2LMHeadModel

    return GPT2LMHeadModel(
        GPT2Config(
            vocab_size=40, n_positions=16, n_embd=16, n_layer=2, n_head=2, bos_token_id=0, eos_token_id=0
        )
    )


def _t5() -> nn.Module:
    from transformers import T5Config, T5ForConditionalGeneration

    config = T5Config(
        vocab_size=40,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_heads=2,
        decoder_start_token_id=0,
        pad_token_id=0,
    )
    return T5ForConditionalGeneration(config)


def _mixtral() -> nn.Module:
    from transformers import MixtralConfig, MixtralForCausalLM

    config = MixtralConfig(
        vocab_size=40, hidden_size=16, intermediate_size=16, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, num_local_experts=2, num_experts_per_tok=1, max_position_embeddings=16,
        output_router_logits=True, experts_implementation="grouped_mm",
    )  # fmt: skip
    return MixtralForCausalLM(config)


@pytest.mark.parametrize(
    ("build", "dtype", "bound"),
    [
        (_gpt2, torch.float64, 1e-12),
        (_t5, torch.float64, 1e-12),
        (_mixtral, torch.float32, 1e-5),
    ],
)
def test_hugging_face(build: Any, dtype: torch.dtype, bound: float) -> None:
    torch.manual_seed(0)
    torch.set_default_dtype(dtype)
    try:
        model = build().to(dtype).train()
        batch = {"input_ids": torch.randint(3, 40, (4, 6)), "labels": torch.randint(3, 40, (4, 6))}
        divided = partition(model, batch)
        assert len(divided.sections) > 4
        for num_samples in (3, 1, 4):
            assert_same_step(
                model, divided, {key: value[:num_samples] for key, value in batch.items()}, bound=bound
            )
    finally:
        torch.set_default_dtype(torch.float32)


def test_t5_decoder_cuts_carry_hidden_encoder_output_and_bias() -> None:
    model = _t5().train()
    batch = {"input_ids": torch.randint(3, 40, (4, 6)), "labels": torch.randint(3, 40, (4, 6))}
    divided = partition(model, batch, cut_points=["decoder.block.0"])
    assert len(divided.sections[0].sent) == 3
    assert all(spec.differentiable for spec in divided.sections[0].sent)


def test_sections_run_under_autocast() -> None:
    model, batch = GPT(), language_batch(3)
    with torch.autocast("cpu", torch.bfloat16):
        expected = model(**batch)
    divided = partition(model, batch)
    values: tuple[Tensor, ...] = ()
    with torch.autocast("cpu", torch.bfloat16):
        for section in divided.sections:
            values = section.run(batch, values)
    assert torch.equal(values[0], expected)
    assert F.mse_loss(values[0].float(), expected.float()) == 0
