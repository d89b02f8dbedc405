"""Weights for other programs: safetensors files, Hugging Face directories, the command."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel

from tests.checkpoint.state import save, trained
from varuna.checkpoint.collect import section_state
from varuna.checkpoint.commit import Committer
from varuna.checkpoint.export import export_huggingface, export_safetensors
from varuna.checkpoint.find import Checkpoint, find_checkpoint
from varuna.checkpoint.names import buffer_name, parameter_name
from varuna.checkpoint.save import Saver
from varuna.checkpoint.shares import Share
from varuna.checkpoint.store import open_store
from varuna.checkpoint.values import JobState
from varuna.cli.checkpoint import checkpoint as command
from varuna.errors import ConfigError
from varuna.partition.ties import canonical_names


def gpt(seed: int = 0) -> GPT2LMHeadModel:
    torch.manual_seed(seed)
    return GPT2LMHeadModel(GPT2Config(vocab_size=64, n_positions=16, n_embd=16, n_layer=2, n_head=2)).eval()


def save_model(root: Path, model: nn.Module) -> Checkpoint:
    """A checkpoint of a model, one section."""
    store = open_store(str(root))
    committer = Committer(store, publish=lambda event: pytest.fail(str(event)))
    order = committer.begin(5)
    section = section_state(0, dict(model.named_parameters()), dict(model.named_buffers()))
    saver = Saver(store, "w0")
    answer = saver.save(order, [section], Share(write=tuple(section.tensors))).result(timeout=30)
    saver.close()
    canonical = canonical_names(model)
    parameters = dict(model.named_parameters())
    names = {
        name: parameter_name(canonical[name]) if canonical[name] in parameters else buffer_name(name)
        for name in model.state_dict()
    }
    job = JobState(step=5, num_samples=5, seed=0, batch_size=1, dataset_length=9, model_names=names)
    committer.commit(order, job, [answer], required=section.tensors, num_sections=1)
    found = find_checkpoint(store, publish=lambda event: pytest.fail(str(event)))
    assert found is not None
    return found


def logits(model: nn.Module) -> torch.Tensor:
    with torch.no_grad():
        return model(torch.arange(12).view(1, 12)).logits


# --- export ---------------------------------------------------------------------------------


def test_one_file_that_a_plain_model_loads_strictly_with_ties_and_buffers(tmp_path):
    state = trained()
    save(open_store(str(tmp_path / "run")), state, 2, 2)
    found = find_checkpoint(open_store(str(tmp_path / "run")), publish=lambda event: pytest.fail(str(event)))
    assert found is not None
    size_bytes = export_safetensors(found, tmp_path / "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size == size_bytes
    other = trained(0, seed=5).model
    other.load_state_dict(load_file(tmp_path / "model.safetensors"))
    for name, value in state.model.state_dict().items():
        assert torch.equal(other.state_dict()[name], value), name


@pytest.mark.parametrize("max_shard_bytes", [10**9, 20_000])
def test_a_huggingface_directory_that_transformers_loads_with_equal_logits(tmp_path, max_shard_bytes):
    model = gpt()
    model.save_pretrained(tmp_path / "source")
    (tmp_path / "source" / "tokenizer.json").write_text("{}")
    (tmp_path / "source" / "old.bin").write_bytes(b"weights")
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.1)
    found = save_model(tmp_path / "run", model)
    names = export_huggingface(
        found, tmp_path / "out", source=tmp_path / "source", max_shard_bytes=max_shard_bytes
    )
    assert {path.name for path in (tmp_path / "out").iterdir()} == set(names)
    assert "tokenizer.json" in names
    assert "old.bin" not in names
    assert ("model.safetensors.index.json" in names) == (max_shard_bytes == 20_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    assert torch.equal(logits(loaded), logits(model))
    with pytest.raises(ConfigError, match="is not empty"):
        export_huggingface(found, tmp_path / "out")
    with pytest.raises(ConfigError, match=r"has no config\.json"):
        export_huggingface(found, tmp_path / "out2", source=tmp_path / "run")


def test_a_wrapped_model_loses_its_prefix(tmp_path):
    class Wrapped(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.model = gpt()

    wrapped = Wrapped()
    found = save_model(tmp_path / "run", wrapped)
    export_safetensors(found, tmp_path / "out.safetensors", prefix="model.")
    assert load_file(tmp_path / "out.safetensors").keys() == wrapped.model.state_dict().keys()
    with pytest.raises(ConfigError, match=r"does not begin with the prefix 'net\.'"):
        export_safetensors(found, tmp_path / "out.safetensors", prefix="net.")


def test_a_damaged_checkpoint_is_not_exported_and_leaves_nothing(tmp_path):
    found = save_model(tmp_path / "run", gpt())
    (part,) = (tmp_path / "run").glob("*/section*")
    data = bytearray(part.read_bytes())
    data[-100] ^= 1
    part.write_bytes(data)
    with pytest.raises(Exception, match=r"expected crc32 \w+, found"):
        export_safetensors(found, tmp_path / "out.safetensors")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run"]


# --- the command ----------------------------------------------------------------------------


def run(*arguments: object):
    return CliRunner().invoke(command, [str(argument) for argument in arguments], catch_exceptions=False)


def test_the_command_lists_verifies_and_exports(tmp_path):
    root = tmp_path / "run"
    nothing = run("ls", root)
    assert (nothing.exit_code, nothing.output) == (0, f"No checkpoints in {root}.\n")
    assert run("verify", root).exit_code == 1
    model = gpt()
    model.save_pretrained(tmp_path / "source")
    found = save_model(root, model)
    Committer(open_store(str(root)), publish=lambda event: pytest.fail(str(event))).begin(6)
    listing = run("ls", root).output.splitlines()
    assert listing[0].split() == ["step", "saved", "(UTC)", "size", "parts", "directory"]
    assert listing[1].split()[:2] == ["6", "incomplete"]
    assert listing[2].split()[0] == "5"
    assert listing[2].split()[-1] == found.directory
    verified = run("verify", root)
    assert (verified.exit_code, verified.output.startswith(f"{found.directory}: ok (1 parts")) == (0, True)
    exported = run("export", root, tmp_path / "m.safetensors", "--step", 5)
    assert exported.exit_code == 0, exported.output
    assert torch.equal(load_file(tmp_path / "m.safetensors")["lm_head.weight"], model.lm_head.weight)
    exported = run("export", root, tmp_path / "hf", "--huggingface", "--source", tmp_path / "source")
    assert exported.exit_code == 0, exported.output
    assert torch.equal(logits(AutoModelForCausalLM.from_pretrained(tmp_path / "hf").eval()), logits(model))
    wrong = run("export", root, tmp_path / "m.safetensors", "--step", 4)
    assert wrong.exit_code == 1
    assert "no complete checkpoint of step 4" in wrong.output
    assert run("export", root, tmp_path / "m", "--source", tmp_path).exit_code == 2
