"""Weights from other programs: Hugging Face directories, read by name and only in part."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, GPT2Model

from varuna.checkpoint.errors import StateError
from varuna.checkpoint.pretrained import open_pretrained
from varuna.checkpoint.pretrained_names import match_names
from varuna.run.initial import give_values


def gpt(seed: int = 0, width: int = 16) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=width, n_layer=2, n_head=2)).eval()


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(1, 12)).logits


def fill(model: nn.Module, directory: Path, **options) -> None:
    """As two workers would, each its half."""
    source = open_pretrained(directory, model, **options)
    names = sorted(name for name, _ in [*model.named_parameters(), *model.named_buffers()])
    for half in (names[::2], names[1::2]):
        give_values(model, source, half, "cpu")


def message(directory: Path, model: nn.Module, **options) -> str:
    with pytest.raises(StateError) as raised:
        open_pretrained(directory, model, **options)
    return str(raised.value)


def save_state(directory: Path, weights: dict[str, torch.Tensor]) -> None:
    save_file({name: value.contiguous() for name, value in weights.items()}, directory / "model.safetensors")


# --- values ---------------------------------------------------------------------------------


@pytest.mark.parametrize("max_shard_size", ["5GB", "20KB"])
def test_a_directory_is_read_by_name_single_or_sharded(tmp_path, max_shard_size):
    saved, model = gpt(1), gpt(2)
    saved.save_pretrained(tmp_path, max_shard_size=max_shard_size)
    assert (tmp_path / "model.safetensors").exists() == (max_shard_size == "5GB")
    assert not torch.equal(logits(model), logits(saved))
    fill(model, tmp_path)
    assert torch.equal(logits(model), logits(saved))


def test_prefixes_of_base_models_in_both_directions(tmp_path):
    saved = gpt(1)
    saved.transformer.save_pretrained(tmp_path / "base")  # names without "transformer."
    model = gpt(2)
    fill(model, tmp_path / "base")
    assert torch.equal(logits(model), logits(saved))
    saved.save_pretrained(tmp_path / "head")
    base = GPT2Model(saved.config).eval()
    fill(base, tmp_path / "head")
    assert torch.equal(base.state_dict()["h.1.mlp.c_fc.weight"], saved.transformer.h[1].mlp.c_fc.weight)


def test_a_wrappers_prefix_is_taken_off_and_what_it_adds_is_kept(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = gpt(2)
            self.scale = nn.Parameter(torch.ones(3))

    saved, model = gpt(1), Wrapped()
    saved.save_pretrained(tmp_path)
    assert "1 of the model are not there: scale" in message(tmp_path, model, prefix="net.")
    source = open_pretrained(tmp_path, model, prefix="net.", strict=False)
    assert (source.missing, source.unexpected) == (("scale",), ())
    give_values(model, source, [name for name, _ in model.named_parameters()], "cpu")
    assert torch.equal(logits(model.net), logits(saved))
    assert torch.equal(model.scale, torch.ones(3))


def test_types_are_converted_to_the_models(tmp_path):
    saved, model = gpt(1), gpt(2)
    save_state(tmp_path, {name: value.double() for name, value in saved.transformer.state_dict().items()})
    fill(model, tmp_path)
    assert torch.equal(logits(model), logits(saved))
    half = gpt(2).to(torch.bfloat16)
    fill(half, tmp_path)
    expected = saved.transformer.h[0].mlp.c_fc.weight.to(torch.bfloat16)
    assert torch.equal(half.transformer.h[0].mlp.c_fc.weight, expected)


def test_a_tied_weight_is_found_under_any_of_its_names_and_must_have_one_value(tmp_path):
    saved, model = gpt(1), gpt(2)
    weights = {name: value.clone() for name, value in saved.state_dict().items()}
    save_state(tmp_path, {name: value for name, value in weights.items() if name != "transformer.wte.weight"})
    fill(model, tmp_path)
    assert torch.equal(logits(model), logits(saved))
    assert model.lm_head.weight is model.transformer.wte.weight
    save_state(tmp_path, weights)
    fill(gpt(3), tmp_path)
    weights["lm_head.weight"][0, 0] += 1
    save_state(tmp_path, weights)
    with pytest.raises(StateError, match=r"lm_head\.weight are one tensor in the model and two different ones"):
        fill(model, tmp_path)


def test_on_meta_only_what_is_named_gets_storage_and_only_its_bytes_are_read(tmp_path):
    saved = gpt(1, width=256)
    saved.save_pretrained(tmp_path)
    with torch.device("meta"):
        model = GPT2LMHeadModel(saved.config)
    source = open_pretrained(tmp_path, model)
    first_block = [name for name, _ in model.named_parameters() if ".h.0." in name]
    wanted_bytes = sum(saved.get_parameter(name).nbytes for name in first_block)
    assert wanted_bytes < 0.5 * (tmp_path / "model.safetensors").stat().st_size
    parameter = model.transformer.h[0].mlp.c_fc.weight
    before_bytes = bytes_read()
    give_values(model, source, first_block, "cpu")
    assert bytes_read() - before_bytes == pytest.approx(wanted_bytes, abs=10_000)
    assert model.transformer.h[0].mlp.c_fc.weight is parameter
    for name, value in model.named_parameters():
        assert value.is_meta == (name not in first_block)
        assert value.is_meta or torch.equal(value, saved.get_parameter(name))


def bytes_read() -> int:
    """By this process with any read call so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


# --- what does not fit ----------------------------------------------------------------------


def test_what_does_not_fit_is_listed_with_close_names(tmp_path):
    weights = {name: value.clone() for name, value in gpt(1).state_dict().items()}
    weights["transformer.h.1.ln1.bias"] = weights.pop("transformer.h.1.ln_1.bias")
    weights["transformer.wpe.weight"] = torch.zeros(99, 16)
    weights["transformer.h.0.mlp.c_fc.bias"] = torch.zeros(64, dtype=torch.int8)
    weights["other.weight"] = torch.zeros(1)
    save_state(tmp_path, weights)
    told = message(tmp_path, gpt())
    assert "1 of the model are not there: transformer.h.1.ln_1.bias (there is transformer.h.1.ln1.bias)" in told
    assert "2 there are not of the model: other.weight, transformer.h.1.ln1.bias" in told
    assert "transformer.wpe.weight is float32[16, 16] in the model and float32[99, 16] there" in told
    assert "transformer.h.0.mlp.c_fc.bias is float32[64] in the model and int8[64] there" in told
    loose = message(tmp_path, gpt(), strict=False)  # shapes and kinds must fit all the same
    assert "not there" not in loose
    assert "float32[99, 16]" in loose


def test_names_that_transformers_ignores_are_ignored(tmp_path):
    model = gpt()
    weights = {name: value.clone() for name, value in model.state_dict().items()}
    weights["transformer.h.0.attn.bias"] = torch.zeros(1)
    del weights["transformer.h.1.ln_1.bias"]
    save_state(tmp_path, weights)
    model.transformer._keys_to_ignore_on_load_unexpected = [r"h\.\d+\.attn\.bias"]
    model._keys_to_ignore_on_load_missing = [r"ln_1\.bias$"]
    source = open_pretrained(tmp_path, model)
    assert "transformer.h.1.ln_1.bias" not in source.names


def test_nothing_that_fits_is_an_error_even_if_not_strict(tmp_path):
    save_state(tmp_path, {"a": torch.zeros(1)})
    assert "28 of the model are not there" in message(tmp_path, gpt(), strict=False)


def test_directories_that_cannot_be_read(tmp_path):
    model = nn.Linear(1, 1)
    assert "No directory" in message(tmp_path / "nowhere", model)
    assert "holds neither model.safetensors nor model.safetensors.index.json" in message(tmp_path, model)
    (tmp_path / "pytorch_model.bin").write_bytes(b"\x80\x02")
    assert "only as pickle (pytorch_model.bin), which is never loaded here" in message(tmp_path, model)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text("{")
    assert "Cannot read" in message(tmp_path, model)
    index.write_text(json.dumps({"weight_map": {"a": "../outside.safetensors"}}))
    assert "names files outside its directory" in message(tmp_path, model)
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors"}}))
    assert "part.safetensors: [Errno 2]" in message(tmp_path, model)
    save_file({"a": torch.zeros(100)}, tmp_path / "part.safetensors")
    whole = (tmp_path / "part.safetensors").read_bytes()
    (tmp_path / "part.safetensors").write_bytes(whole[:-1])
    assert "expected" in message(tmp_path, model)
    (tmp_path / "part.safetensors").write_bytes(whole)
    (tmp_path / "twice.safetensors").write_bytes(whole)
    index.write_text(json.dumps({"weight_map": {"a": "part.safetensors", "b": "twice.safetensors"}}))
    assert "has a in part.safetensors, twice.safetensors" in message(tmp_path, model)


def test_a_file_cut_after_it_was_opened_is_told(tmp_path):
    saved = gpt(1)
    saved.save_pretrained(tmp_path)
    source = open_pretrained(tmp_path, gpt(2))
    with (tmp_path / "model.safetensors").open("r+b") as file:
        file.truncate(5000)
    with pytest.raises(StateError, match=r"Cannot read .*model\.safetensors: EOFError"):
        give_values(gpt(2), source, ["transformer.h.1.mlp.c_fc.weight"], "cpu")


# --- names ----------------------------------------------------------------------------------


def matched(ours: Iterable[str], there: Iterable[str], **options) -> tuple[dict, tuple, tuple]:
    found = match_names({name: [name] for name in ours}, set(there), **options)
    return dict(found.found), found.missing, found.unexpected


def test_names_and_prefixes():
    assert matched(["a.w", "b.w"], ["a.w", "b.w"]) == ({"a.w": ("a.w",), "b.w": ("b.w",)}, (), ())
    assert matched(["m.a.w", "m.b.w"], ["a.w", "b.w", "c.w"]) == (
        {"m.a.w": ("a.w",), "m.b.w": ("b.w",)},
        (),
        ("c.w",),
    )
    assert matched(["a.w", "b.w"], ["m.a.w", "head.w"]) == ({"a.w": ("m.a.w",)}, ("b.w",), ("head.w",))
    assert matched(["net.a.w", "b.w"], ["m.a.w"], prefix="net.") == ({"net.a.w": ("m.a.w",)}, ("b.w",), ())
    assert matched(["a.w"], ["b.w"], may_miss=["^a"], ignored=["w$"]) == ({}, (), ())


def test_many_names_are_matched_at_once():
    names = [f"model.layers.{layer}.mlp.{part}.weight" for layer in range(2000) for part in "abcde"]
    there = [name.removeprefix("model.") for name in names]
    found, missing, unexpected = matched(names, there)
    assert (len(found), missing, unexpected) == (10_000, (), ())
