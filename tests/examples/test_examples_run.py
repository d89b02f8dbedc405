"""Each example by its one command, on its real data, until its stated result: ``make test-examples``.

The results are those of docs/guides/examples.md.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

pytestmark = [pytest.mark.examples, pytest.mark.timeout(2400)]

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = REPOSITORY / "examples"
TRAINER = REPOSITORY / "docs" / "guides" / "trainer"
VARUNA = str(Path(sys.executable).with_name("varuna"))


def run(folder: Path, *words: object) -> str:
    """Output of a command that ends well; both streams."""
    environ = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "VARUNA_CACHE_DIR": str(folder / "varuna"),
        "HF_HUB_OFFLINE": "1",
    }
    done = subprocess.run(
        [str(word) for word in words],
        env=environ,
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    print(done.stdout)
    assert done.returncode == 0
    return done.stdout


def summary_of(folder: Path) -> dict[str, Any]:
    return dict(json.loads((folder / "summary.json").read_text()))


def test_gpt_reaches_the_loss_of_its_twin(tmp_path: Path) -> None:
    told = run(tmp_path, VARUNA, "run", "--workers", 2, EXAMPLES / "gpt.py")
    assert "--- the model writes ---\nThe " in told
    assert re.search(r"Validation after step 120: loss 4\.\d+, perplexity \d+", told)
    run(tmp_path, sys.executable, EXAMPLES / "gpt_plain.py")
    mine = summary_of(tmp_path / "runs" / "gpt")["validation_losses"]["120"]
    twin = summary_of(tmp_path / "runs" / "gpt-plain")["validation_losses"]["120"]
    print(f"validation loss: {mine:.4f} with Varuna, {twin:.4f} without, {mine / twin - 1:+.2%}")
    assert mine == pytest.approx(twin, rel=0.01)
    assert mine < 4.8


def test_a_gpt_built_without_storage_learns_and_is_exported_from_its_checkpoint(tmp_path: Path) -> None:
    (tmp_path / "text.txt").write_text("The cat sat on the mat, and the dog lay on the rug. " * 2000)
    (tmp_path / "large.py").write_text(
        f"import sys\nsys.path.insert(0, {str(EXAMPLES)!r})\n"
        "import gpt\ngpt.MOST_ON_EVERY_WORKER = 0\ngpt.main()\n"
    )
    sizes = "--layers 2 --width 64 --heads 2 --seq-length 32 --vocab-size 300 --batch-size 16 --steps 30"
    training = "--lr 5e-3 --lr-decay-style cosine --precision fp32 --no-export --data text.txt"
    launch = [VARUNA, "run", "--workers", 2, "--stages", 2, "--micro-batch-size", 4, "--checkpoint", "saved"]
    run(tmp_path, *launch, "large.py", *sizes.split(), *training.split())
    summary = summary_of(tmp_path / "runs" / "gpt")
    assert summary["validation_losses"]["30"] < 0.5
    assert not (tmp_path / "runs" / "gpt" / "model.safetensors").exists()
    run(tmp_path, VARUNA, "checkpoint", "export", "saved", "model.safetensors")
    assert (tmp_path / "model.safetensors").stat().st_size >= 4 * summary["num_parameters"]


def test_bert_learns_words(tmp_path: Path) -> None:
    told = run(tmp_path, VARUNA, "run", "--workers", 2, EXAMPLES / "bert.py")
    summary = summary_of(tmp_path / "runs" / "bert")
    assert summary["words_right"] > 2 * summary["most_frequent_word"]
    assert summary["pairs_right"] > 0.55
    assert "of masked words and" in told

    from transformers import BertForPreTraining, BertTokenizerFast

    model = BertForPreTraining.from_pretrained(tmp_path / "runs" / "bert" / "model")
    tokenizer = BertTokenizerFast.from_pretrained(tmp_path / "runs" / "bert" / "model")
    assert model.config.vocab_size == len(tokenizer)


@pytest.mark.skipif(
    not Path("/usr/share/datasets/fashion-mnist").is_dir(), reason="dataset-fashion-mnist is not installed"
)
def test_fashion_reaches_its_accuracy(tmp_path: Path) -> None:
    run(tmp_path, VARUNA, "run", "--workers", 2, EXAMPLES / "fashion.py")
    summary = summary_of(tmp_path / "runs" / "fashion")
    assert summary["accuracy"] >= 0.88


def test_finetuning_writes_a_directory_that_transformers_loads(tmp_path: Path) -> None:
    saved, exported = tmp_path / "runs" / "finetune", tmp_path / "exported"
    checkpoints = tmp_path / "checkpoints"
    command = [VARUNA, "run", "--workers", 2, "--stages", 2, "--checkpoint", checkpoints]
    told = run(tmp_path, *command, EXAMPLES / "finetune_hf.py")
    assert "its logits are equal." in told
    summary = summary_of(saved)
    assert summary["loss_after"] < summary["loss_before"] - 1.5
    export = ["checkpoint", "export", checkpoints, exported, "--huggingface", "--source", saved / "base"]
    run(tmp_path, VARUNA, *export)

    from transformers import AutoModelForCausalLM, AutoTokenizer

    batch = AutoTokenizer.from_pretrained(exported)("a person who", return_tensors="pt")
    with torch.inference_mode():
        from_job, from_checkpoint, base = (
            AutoModelForCausalLM.from_pretrained(folder).eval()(**batch).logits
            for folder in (saved / "tuned", exported, saved / "base")
        )
    assert torch.equal(from_job, from_checkpoint)
    assert not torch.equal(from_job, base)


def test_the_ported_trainer_script_does_what_it_did(tmp_path: Path) -> None:
    sys.path.insert(0, str(EXAMPLES))
    try:
        from finetune_hf import make_model
        from text_data import find_corpus
    finally:
        sys.path.remove(str(EXAMPLES))
    make_model(tmp_path / "model")
    (tmp_path / "text.txt").write_text("\n\n".join(find_corpus(None, 600_000).documents)[:300_000])
    before = run(tmp_path, sys.executable, TRAINER / "before.py", "model", "text.txt", "--output", "a")
    after = run(
        tmp_path, VARUNA, "run", "--workers", 2, TRAINER / "after.py", "model", "text.txt", "--output", "b"
    )
    losses = [float(re.findall(r"validation loss (\d+\.\d+)", told)[0]) for told in (before, after)]
    print(f"validation loss: {losses[0]} by the Trainer, {losses[1]} by Varuna")
    # the Trainer divides by all labels of a sample, also the first, which nothing predicts
    assert losses[1] == pytest.approx(losses[0] * 64 / 63, rel=0.01)

    from transformers import AutoModelForCausalLM

    shapes = [
        {name: value.shape for name, value in AutoModelForCausalLM.from_pretrained(folder).state_dict().items()}
        for folder in (tmp_path / "a", tmp_path / "b")
    ]
    assert shapes[0] == shapes[1]
