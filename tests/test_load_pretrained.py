"""``job.load_pretrained``: a Hugging Face directory, two stages and two pipelines, against transformers."""

from __future__ import annotations

import dataclasses
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

import varuna
from tests.cases import jobs, plain
from tests.cases.jobs import Training
from varuna import cli
from varuna.checkpoint.errors import StateError
from varuna.errors import ConfigError, WeightsDiffer

BOUND = 1e-12
VOCAB, TIME = 64, 12


class Text:
    """Random tokens; every label counts."""

    def __init__(self, num_samples: int = 40) -> None:
        self._tokens = torch.randint(0, VOCAB, (num_samples, TIME), generator=torch.Generator().manual_seed(5))

    def __len__(self) -> int:
        return len(self._tokens)

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        return {"input_ids": self._tokens[index], "labels": self._tokens[index]}


def gpt2_config() -> GPT2Config:
    return GPT2Config(
        vocab_size=VOCAB, n_positions=16, n_embd=32, n_layer=4, n_head=4, use_cache=False,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0,
    )  # fmt: skip


def llama_config() -> LlamaConfig:
    return LlamaConfig(
        vocab_size=VOCAB, hidden_size=256, intermediate_size=512, num_hidden_layers=10, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=16, tie_word_embeddings=True, use_cache=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def gpt2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("gpt2")
    GPT2LMHeadModel(gpt2_config()).save_pretrained(directory)
    return directory


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(1)
    directory = tmp_path_factory.mktemp("llama")
    LlamaForCausalLM(llama_config()).save_pretrained(directory, max_shard_size="8MB")
    assert (directory / "model.safetensors.index.json").exists()
    return directory


def gpt2_unlike_others() -> nn.Module:
    """On the CPU, other weights in every process."""
    torch.manual_seed(os.getpid())
    return GPT2LMHeadModel(gpt2_config())


def llama_on_meta() -> nn.Module:
    with torch.device("meta"):
        return LlamaForCausalLM(llama_config())


def adamw(model: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.AdamW(model.parameters(), lr=0.01)


def training(model: Any, **changed: Any) -> Training:
    options = {"precision": "fp64", "clip_grad_norm": 1.0}
    fields = {"dataset": Text(), "optimizer": adamw, "num_stages": 2, "num_steps": 2, "options": options}
    return Training(model=model, **{**fields, **changed})


def loaded_and_trained(training: Training, directory: str, saved: str) -> dict[str, Any]:
    """Steps; bytes in files of what is held, and bytes read until then; the state goes to a file."""
    job, model = training.job()
    with job:
        before_bytes = bytes_read()
        job.load_pretrained(directory)
        assert job.plan.num_workers == int(os.environ["WORLD_SIZE"])
        read_bytes = bytes_read() - before_bytes
        held_bytes = sum(value.numel() * 4 for value in model.parameters() if not value.is_meta)
        steps = [dataclasses.asdict(step) for step in job.train(training.num_steps)]
        if state := job.full_state_dict():
            save_file({name: value.clone() for name, value in state.items()}, saved)
        return {"steps": steps, "observed": [held_bytes, read_bytes], "state": {}}


def bytes_read() -> int:
    """By this process with any read call so far."""
    return int(Path("/proc/self/io").read_text().split()[1])


def loss_of(model: nn.Module, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, int]:
    num_samples = len(batch["labels"])
    return model(**batch).loss * num_samples, num_samples


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_a_loaded_model_trains_as_the_one_transformers_loads(name: str, request: Any, tmp_path: Path) -> None:
    directory = request.getfixturevalue(name)
    ours = training({"gpt2": gpt2_unlike_others, "llama": llama_on_meta}[name])
    saved = str(tmp_path / "state.safetensors")
    results = jobs.run_workers(4, loaded_and_trained, ours, str(directory), saved)
    ran, state = jobs.collect(results), load_file(saved)
    reference = training(lambda: AutoModelForCausalLM.from_pretrained(directory).double())
    theirs = plain.train(reference, loss_of, micro_batch_size=2)
    assert plain.difference({name: state[name] for name in theirs.state}, theirs.state) < BOUND
    assert state.keys() == theirs.state.keys()
    plain.assert_equal(ran.loss, theirs.losses)
    plain.assert_equal(ran.grad_norm, theirs.grad_norms)
    tied = {"gpt2": "transformer.wte.weight", "llama": "model.embed_tokens.weight"}[name]
    assert torch.equal(state["lm_head.weight"], state[tied])
    if name == "llama":  # large enough to tell what is read of it from whatever else a start reads
        size_bytes = sum(path.stat().st_size for path in directory.glob("*.safetensors"))
        for held_bytes, read_bytes in ran.observed[1:]:  # worker 0 captures, and reads much source code
            assert 0.4 * size_bytes < held_bytes < 0.6 * size_bytes
            assert held_bytes < read_bytes < held_bytes + 0.25 * size_bytes


class Scored(nn.Module):
    """A user's own head on a loaded model."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.net = GPT2LMHeadModel(gpt2_config())
        self.scale = nn.Parameter(torch.full((VOCAB,), 1.5))

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        logits = self.net(input_ids).logits * self.scale
        return nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())


def wrapped(training: Training, directory: str) -> dict[str, Any]:
    told: list[Any] = []
    training.options["progress"] = told.append
    job, _ = training.job()
    with job:
        with pytest.raises(StateError, match=r"1 of the model are not there: scale"):
            job.load_pretrained(directory, prefix="net.")
        job.load_pretrained(directory, prefix="net.", strict=False)
        state = job.full_state_dict()
        with pytest.raises(ConfigError, match="load_pretrained comes too late"):
            job.load_pretrained(directory)
        return {"state": state, "told": [event.text for event in told if hasattr(event, "text")]}


def test_a_wrapper_keeps_what_it_adds(gpt2: Path) -> None:
    (result,) = jobs.run_workers(1, wrapped, training(Scored, num_stages=1), str(gpt2))
    expected = AutoModelForCausalLM.from_pretrained(gpt2).double().state_dict()
    assert torch.equal(result["state"].pop("scale"), torch.full((VOCAB,), 1.5, dtype=torch.float64))
    assert plain.difference({name[4:]: value for name, value in result["state"].items()}, expected) == 0
    assert any("1 of the model are not there: scale." in text for text in result["told"])


def unlike_beside(training: Training, directory: str) -> str:
    job, model = training.job()
    model.scale.data.fill_(os.getpid())
    with job:
        job.load_pretrained(directory, prefix="net.", strict=False)
        try:
            job.plan  # noqa: B018
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return ""


def test_weights_that_are_not_loaded_must_still_be_equal_everywhere(gpt2: Path) -> None:
    results = jobs.run_workers(2, unlike_beside, training(Scored, num_stages=2), str(gpt2))
    assert results[1].startswith(f"{WeightsDiffer.__name__}: ")


def test_from_a_directory_through_checkpoints_to_a_directory(gpt2: Path, tmp_path: Path) -> None:
    """A job that goes on has its weights from the checkpoint, not from the directory again."""
    url, saved = str(tmp_path / "run"), str(tmp_path / "state.safetensors")
    options = {"clip_grad_norm": 1.0, "checkpoint": varuna.Checkpoints(url=url)}
    first = training(gpt2_unlike_others, options=options)
    one, two = (
        jobs.collect(jobs.run_workers(2, loaded_and_trained, replace(first, num_steps=steps), str(gpt2), saved))
        for steps in (2, 3)
    )
    assert (one.index, two.index) == ([0, 1], [2])
    command = [url, str(tmp_path / "tuned"), "--huggingface", "--source", str(gpt2)]
    exported = CliRunner().invoke(cli.main, ["checkpoint", "export", *command])
    assert exported.exit_code == 0, exported.output
    tuned, expected = AutoModelForCausalLM.from_pretrained(tmp_path / "tuned"), gpt2_unlike_others()
    expected.load_state_dict(load_file(saved))
    tokens = Text()[0]["input_ids"][None]
    with torch.no_grad():
        assert torch.equal(tuned.eval()(tokens).logits, expected.eval()(tokens).logits)
