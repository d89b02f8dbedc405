"""Storage comes and goes in place; values depend on seed and module, not on what else is here."""

from __future__ import annotations

import gc
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor, nn

from tests.partition.split_support import GPT
from varuna.errors import UserError
from varuna.partition.materialise import digest_of, materialise, release


def _on_meta(build: Any) -> Any:
    with torch.device("meta"):
        return build()


def _names(model: nn.Module) -> list[str]:
    return [name for name, _ in (*model.named_parameters(), *model.named_buffers())]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def test_identity_ties_and_optimizer_survive() -> None:
    model = _on_meta(GPT)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)}
    model.norm.weight.note = "kept"
    materialise(model, _names(model), seed=0, device="cpu")
    assert {name: id(p) for name, p in model.named_parameters(remove_duplicate=False)} == before
    assert model.head.weight is model.tokens.weight
    assert model.norm.weight.note == "kept"
    assert all(not p.is_meta and p.requires_grad for group in optimizer.param_groups for p in group["params"])
    model(torch.zeros(1, 4, dtype=torch.int64), torch.zeros(1, 4, dtype=torch.int64)).backward()
    optimizer.step()


def test_values_do_not_depend_on_what_is_here_or_on_the_order() -> None:
    whole = _on_meta(GPT)
    materialise(whole, _names(whole), seed=5, device="cpu")
    parts = _on_meta(GPT)
    for name in reversed(_names(parts)[len(_names(parts)) // 3 :]):
        materialise(parts, [name], seed=5, device="cpu")
    expected = _tensors(whole)
    held = {name: tensor for name, tensor in _tensors(parts).items() if not tensor.is_meta}
    assert 0 < len(held) < len(expected)
    assert digest_of(held.values()) == digest_of(expected[name] for name in held)
    other = _on_meta(GPT)
    materialise(other, _names(other), seed=6, device="cpu")
    assert not torch.equal(other.tokens.weight, whole.tokens.weight)


def test_the_default_generator_is_left_alone() -> None:
    model = _on_meta(GPT)
    state = torch.get_rng_state()
    materialise(model, _names(model), seed=0, device="cpu")
    assert torch.equal(torch.get_rng_state(), state)


def test_distributions_are_those_of_the_constructor() -> None:
    built, made = GPT(), _on_meta(GPT)
    materialise(made, _names(made), seed=0, device="cpu")
    for name, expected in built.named_parameters():
        found = made.get_parameter(name)
        if expected.std() == 0:
            torch.testing.assert_close(found, expected)
        elif expected.numel() >= 128:
            assert 0.7 < found.std() / expected.std() < 1.4, name


class NanoGPT(nn.Module):
    """Initialises like nanoGPT: one ``_init_weights`` on the root, applied to every module."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.norm, self.out = nn.Embedding(50, 20), nn.LayerNorm(20), nn.Linear(20, 50)

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.normal_(module.weight, std=0.01)
            nn.init.constant_(module.bias, 3.0)
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=5.0)


def test_the_models_own_init_weights_comes_after_the_constructors() -> None:
    model = _on_meta(NanoGPT)
    materialise(model, _names(model), seed=0, device="cpu")
    assert 0.008 < model.out.weight.std() < 0.012
    assert model.out.bias.eq(3.0).all()
    assert 4 < model.embed.weight.std() < 6
    assert model.norm.weight.eq(1.0).all()


def test_the_users_function_replaces_the_models() -> None:
    model = _on_meta(NanoGPT)

    def init(module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.ones_(module.weight)

    materialise(model, _names(model), seed=0, device="cpu", init_weights=init)
    assert model.out.weight.eq(1.0).all()
    assert model.embed.weight.std() < 2


class Attention(nn.Module):
    """A module around it sets its children's weights."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(8, 8), nn.Linear(8, 8)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        nn.init.normal_(self.q.weight, std=7.0)
        nn.init.normal_(self.k.weight, std=0.1)


def test_modules_around_the_owner_have_the_last_word() -> None:
    model = _on_meta(lambda: nn.Sequential(Attention(), nn.MultiheadAttention(8, 2)))
    materialise(model, ["0.k.weight"], seed=0, device="cpu")
    assert model[0].q.weight.is_meta
    kept = model[0].k.weight.clone()
    materialise(model, _names(model), seed=0, device="cpu")
    assert torch.equal(model[0].k.weight, kept)
    assert model[0].q.weight.std() > 4
    assert model[1].out_proj.bias.eq(0).all()


class Unknown(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.register_buffer("mask", torch.ones(3, dtype=torch.bool), persistent=False)
        self.register_buffer("index", torch.arange(3))


@pytest.mark.parametrize(("name", "kind"), [("scale", "parameter"), ("mask", "buffer"), ("index", "buffer")])
def test_a_tensor_that_nothing_sets_is_an_error_that_says_what_to_do(name: str, kind: str) -> None:
    model = _on_meta(lambda: nn.Sequential(nn.Linear(2, 2), Unknown()))
    with pytest.raises(UserError, match=rf"(?s){kind} '1.{name}'.*Unknown.*reset_parameters.*init_weights"):
        materialise(model, [f"1.{name}"], seed=0, device="cpu")


def test_buffers_are_set_too() -> None:
    model = _on_meta(lambda: nn.BatchNorm1d(3))
    materialise(model, _names(model), seed=0, device="cpu")
    assert model.running_var.eq(1).all()
    assert model.num_batches_tracked == 0


@pytest.mark.parametrize("kind", ["llama", "t5"])
def test_hugging_face_models(kind: str) -> None:
    from transformers import LlamaConfig, LlamaForCausalLM, T5Config, T5ForConditionalGeneration

    def build() -> nn.Module:
        if kind == "t5":
            config = T5Config(vocab_size=40, d_model=64, d_kv=8, d_ff=96, num_layers=1, num_heads=8)
            return T5ForConditionalGeneration(config)
        sizes = {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1, "num_attention_heads": 4}
        return LlamaForCausalLM(LlamaConfig(vocab_size=40, **sizes))

    built, made = build(), _on_meta(build)
    materialise(made, _names(made), seed=0, device="cpu")
    for name, expected in _tensors(built).items():
        found = _tensors(made)[name]
        if name.endswith("inv_freq") or expected.std() == 0:
            torch.testing.assert_close(found, expected)
        else:
            assert 0.8 < found.std() / expected.std() < 1.25, name


def test_release_gives_memory_back_and_keeps_identity() -> None:
    model = nn.Sequential(*(nn.Linear(1024, 1024) for _ in range(30)))  # 120 MB
    ids = [id(parameter) for parameter in model.parameters()]
    model(torch.zeros(1, 1024)).sum().backward()
    gc.collect()
    before = psutil.Process().memory_info().rss
    release(model, [name for name, _ in model.named_parameters() if not name.startswith("0.")])
    assert before - psutil.Process().memory_info().rss > 180e6
    assert [id(parameter) for parameter in model.parameters()] == ids
    assert model[1].weight.is_meta
    assert model[1].weight.grad is None
    assert model[1].weight.requires_grad
    assert not model[0].weight.is_meta
    materialise(model, ["1.weight"], seed=0, device="cpu")
    assert not model[1].weight.is_meta


def test_digests_tell_values_dtypes_and_shapes_apart() -> None:
    one = torch.arange(4.0)
    digests = [digest_of([t]) for t in (one, one + 1, one.double(), one.view(2, 2), one.bfloat16())]
    assert len(set(digests)) == 5
    assert digest_of([one.clone()]) == digests[0]
    assert digest_of([torch.tensor(1.0)]) != digest_of([torch.tensor(2.0)])
    with pytest.raises(UserError, match="meta"):
        digest_of([torch.empty(2, device="meta")])
