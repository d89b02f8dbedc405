r"""Fine-tune a Hugging Face model directory, and write one that plain transformers loads.

    varuna run --workers 2 --stages 2 examples/finetune_hf.py    # about two minutes on two cores
    varuna run --hosts machines.txt --checkpoint s3://bucket/tuned examples/finetune_hf.py \
        --model Llama-3.1-8B --data my-texts --seq-length 2048 --batch-size 256 --lr 1e-5 --precision bf16

``--model`` is any directory of a causal language model with safetensors files and a tokenizer. Without it a
small GPT-2 with a tokenizer is made on the spot, which has read only the source of Python. It is tuned to
``--data``, a text file or a folder of them; else to WordNet's sentences (Debian's ``wordnet-base``); else to
docstrings. The tuned directory is ``--save``/tuned.

No worker builds the whole model: it is built without storage, and each reads the tensors of its own stage. Only
at the end worker 0 has it whole; if it is too large for that, say ``--checkpoint DIR`` to ``varuna run`` and
``--no-export`` to the script, and then:

    varuna checkpoint export DIR tuned --huggingface --source MODEL
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import os
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # workers share the cores

import torch
from common import made_once, say
from text_data import find_corpus, find_prose
from tokenizers import ByteLevelBPETokenizer
from torch import Tensor
from torch.utils.data import Dataset
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GPT2Config,
    GPT2LMHeadModel,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.utils.logging import disable_progress_bar

import varuna

END = "<|endoftext|>"
PROMPT = "a person who"


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Fine-tune a Hugging Face model.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--model", type=Path, help="directory; else a small one is made on the spot")
    parser.add_argument("--data", type=Path, help="text file or folder; else WordNet or Python's own prose")
    parser.add_argument("--data-mb", type=float, default=1.0, help="take at most this many megabytes of text")
    parser.add_argument("--seq-length", type=int, default=64, help="tokens in a sample")
    parser.add_argument("--steps", type=int, default=150, help="optimizer updates")
    parser.add_argument("--batch-size", type=int, default=32, help="samples in a global batch")
    parser.add_argument("--lr", type=float, default=1.5e-3, help="highest learning rate")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--export", action=argparse.BooleanOptionalAction, default=True, help="on worker 0")
    parser.add_argument("--save", type=Path, default=Path("runs/finetune"))
    return parser.parse_args()


class Blocks(Dataset[dict[str, Tensor]]):
    """Tokens in samples of equal length; the labels are the tokens, which the model shifts itself."""

    def __init__(self, tokens: Tensor, seq_length: int) -> None:
        self._rows = tokens[: len(tokens) // seq_length * seq_length].view(-1, seq_length)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {"input_ids": self._rows[index], "labels": self._rows[index]}


# --- a model to begin with ------------------------------------------------------------------


def make_model(folder: Path) -> None:
    """A small GPT-2 and its tokenizer, trained for a moment on the source of Python, as a directory."""
    text = "\n\n".join(find_corpus(None, 1_000_000).documents)
    words = ByteLevelBPETokenizer()
    words.train_from_iterator([text], vocab_size=2048, special_tokens=[END], show_progress=False)
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words._tokenizer, eos_token=END, model_max_length=128)
    config = GPT2Config(
        vocab_size=len(tokenizer), n_positions=128, n_embd=128, n_layer=4, n_head=4, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, bos_token_id=0, eos_token_id=0, use_cache=False,
        initializer_range=0.08,  # about 1 / sqrt(n_embd): learns sooner than 0.02, which is for wider models
    )  # fmt: skip
    torch.manual_seed(0)
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    blocks = Blocks(torch.tensor(words.encode(text).ids), 64)
    for start in range(0, 100 * 16, 16):
        batch = torch.utils.data.default_collate([blocks[index] for index in range(start, start + 16)])
        model(**batch).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


# --- fine-tuning ----------------------------------------------------------------------------


def main() -> None:
    args = parse_arguments()
    disable_progress_bar()
    base = args.model or made_once(args.save / "base", make_model)
    tokenizer = AutoTokenizer.from_pretrained(base)
    source, tokens = tokens_of(args, tokenizer)
    border = len(tokens) * 19 // 20  # the last twentieth is for validation
    train, validation = Blocks(tokens[:border], args.seq_length), Blocks(tokens[border:], args.seq_length)

    config = AutoConfig.from_pretrained(base)
    with torch.device("meta"):  # no storage yet, for anything
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, weight_decay=0.01)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_down(step, args.steps))
    job = varuna.Varuna(
        model,
        optimizer,
        train,
        batch_size=args.batch_size,
        lr_scheduler=scheduler,
        precision=args.precision,
        clip_grad_norm=1.0,
        seed=args.seed,
    )
    job.load_pretrained(base)
    if job.rank == 0:
        say(f"Model: {model.num_parameters() / 1e6:.1f} M parameters from {base}. Text: {source}.")
    before = job.evaluate(validation)
    losses = [step.loss for step in job.train(args.steps)]
    after = job.evaluate(validation)
    if job.rank == 0:
        say(f"Validation perplexity {math.exp(before):.1f} before, {math.exp(after):.1f} after.")
        summary = {"source": source, "loss_before": before, "loss_after": after, "train_losses": losses}
        (args.save / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    if not args.export:
        return
    weights = job.full_state_dict()  # on worker 0; empty on the others
    if job.rank == 0:
        export(model, weights, tokenizer, base, args.save / "tuned")


def tokens_of(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> tuple[str, Tensor]:
    """Where the text is from, and its tokens, with an end after each paragraph."""
    prose = find_prose(args.data)
    texts, num_bytes = [], 0
    for paragraph in itertools.islice(prose.paragraphs, 0, None, 7 if args.data is None else 1):  # of all kinds
        texts.append("; ".join(paragraph) + (tokenizer.eos_token or "\n"))
        num_bytes += len(texts[-1])
        if num_bytes > args.data_mb * 1e6:
            break
    ids = tokenizer("".join(texts), verbose=False)["input_ids"]
    return prose.source, torch.tensor(ids)


def export(
    model: PreTrainedModel,
    weights: dict[str, Tensor],
    tokenizer: PreTrainedTokenizerBase,
    base: Path,
    folder: Path,
) -> None:
    """Write the directory, load it with plain transformers, and see that it is the same model."""
    whole = type(model)(model.config).eval()
    whole.load_state_dict(weights)
    whole.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    loaded = AutoModelForCausalLM.from_pretrained(folder).eval()
    batch = tokenizer(PROMPT, return_tensors="pt")
    with torch.inference_mode():
        are_equal = torch.equal(loaded(**batch).logits, whole(**batch).logits)
    say(f"{folder.resolve()}: loaded by transformers, its logits are {'equal' if are_equal else 'DIFFERENT'}.")
    for name, writer in (("before", AutoModelForCausalLM.from_pretrained(base)), ("after", loaded)):
        say(f"{name:>6}: {written_by(writer.eval(), tokenizer)}")


def written_by(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> str:
    """How the model goes on after the prompt."""
    batch = tokenizer(PROMPT, return_tensors="pt")
    torch.manual_seed(0)
    ids = model.generate(
        **batch, max_new_tokens=24, do_sample=True, top_k=10, pad_token_id=tokenizer.eos_token_id
    )
    return repr(tokenizer.decode(ids[0], skip_special_tokens=True))


def warm_up_then_down(step: int, num_steps: int) -> float:
    """Share of the highest learning rate: up over the first tenth, then down in a line."""
    warm_up = max(1, num_steps // 10)
    return (step + 1) / warm_up if step < warm_up else 1.0 - (step - warm_up) / max(1, num_steps - warm_up)


if __name__ == "__main__":
    main()
