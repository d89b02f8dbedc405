r"""Pretrain a BERT of Hugging Face's class: guess masked words, and whether one sentence follows another.

    varuna run --workers 2 examples/bert.py                      # about three minutes on two cores
    python examples/bert.py --steps 20                           # the same script, one worker
    varuna run --hosts machines.txt --checkpoint s3://bucket/bert examples/bert.py --size large \
        --data ~/wikipedia --precision fp16 --batch-size 8192 --steps 20000 --lr 4e-4

The sentences are those of WordNet (Debian's ``wordnet-base``): what each word means, and examples of its use.
If it is not there, the docstrings of Python's standard library; or ``--data``: a text file or a folder of them,
with an empty line between paragraphs. Sentences of one paragraph follow each other. The vocabulary is made of
the same text. A folder that ``from_pretrained`` loads, with its tokenizer, goes to ``--save``/model.

Every sample has the same number of masked words, so that the mean over samples is the mean over words, however
a batch is divided among workers.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path

os.environ["TOKENIZERS_PARALLELISM"] = "false"  # the same vocabulary on every machine

import numpy as np
import torch
from common import made_once, say
from text_data import Prose, find_prose
from tokenizers import BertWordPieceTokenizer
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Subset
from transformers import BertConfig, BertForPreTraining, BertTokenizerFast
from transformers.utils.logging import disable_progress_bar

import varuna

SPECIAL = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
PAD, _, CLS, SEP, MASK = range(len(SPECIAL))
SHOWN = (
    "a small [MASK] that lives in the water",
    "the act of [MASK] something",
    "of or relating to the [MASK]",
)
SHAPES = {
    "tiny": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 2048},
    "base": {"hidden_size": 768, "num_hidden_layers": 12, "num_attention_heads": 12, "vocab_size": 30522},
    "large": {"hidden_size": 1024, "num_hidden_layers": 24, "num_attention_heads": 16, "vocab_size": 30522},
}


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Pretrain a BERT.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", type=Path, help="text file or folder; else WordNet or Python's own prose")
    parser.add_argument("--size", choices=list(SHAPES), default="tiny", help="of the model")
    parser.add_argument("--seq-length", type=int, default=40, help="tokens in a pair of sentences")
    parser.add_argument("--masked", type=int, default=5, help="masked words in a pair")
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--steps", type=int, default=1000, help="optimizer updates")
    parser.add_argument("--batch-size", type=int, default=64, help="pairs in a global batch")
    parser.add_argument("--lr", type=float, default=3e-3, help="highest learning rate")
    parser.add_argument("--precision", default="fp32", help="fp32, bf16, fp16")
    parser.add_argument("--eval-every", type=int, default=500, help="steps between validations")
    parser.add_argument("--eval-samples", type=int, default=1000, help="pairs in a validation")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save", type=Path, default=Path("runs/bert"))
    return parser.parse_args()


# --- sentences ------------------------------------------------------------------------------


def prepare(folder: Path, prose: Prose, vocab_size: int) -> None:
    """Make the vocabulary, and every paragraph's sentences as its tokens."""
    folder.mkdir()
    texts = [texts for texts in prose.paragraphs if sum(len(text) > 10 for text in texts) >= 2]
    texts.sort(key=lambda texts: hashlib.sha256(texts[0].encode()).digest())  # mixed, the same everywhere
    words = BertWordPieceTokenizer(lowercase=True)
    flat = [text for paragraph in texts for text in paragraph if len(text) > 10]
    words.train_from_iterator(flat, vocab_size=vocab_size, special_tokens=SPECIAL, show_progress=False)
    words.save(str(folder / "tokenizer.json"))
    ids = [encoding.ids for encoding in words.encode_batch(flat, add_special_tokens=False)]
    np.savez(
        folder / "sentences.npz",
        tokens=np.concatenate([np.array(sentence, dtype=np.int32) for sentence in ids]),
        ends=np.cumsum([len(sentence) for sentence in ids]),
        paragraphs=np.repeat(
            np.arange(len(texts)), [sum(len(text) > 10 for text in paragraph) for paragraph in texts]
        ),
    )


@dataclass(frozen=True, kw_only=True)
class Sentences:
    """Sentences of many paragraphs, in order.

    Attributes:
        tokens: of all, one after another; shape (num_tokens,).
        ends: where each ends; shape (num_sentences,).
        firsts: those that have another of their paragraph behind them; shape (num_pairs,).
    """

    tokens: np.ndarray
    ends: np.ndarray
    firsts: np.ndarray

    @classmethod
    def load(cls, folder: Path) -> Sentences:
        """What ``prepare`` made."""
        with np.load(folder / "sentences.npz") as arrays:
            paragraph = arrays["paragraphs"]
            firsts = np.flatnonzero(paragraph[:-1] == paragraph[1:])
            return cls(tokens=arrays["tokens"], ends=arrays["ends"], firsts=firsts)

    def sentence(self, index: int) -> np.ndarray:
        """Its tokens."""
        return self.tokens[self.ends[index - 1] if index else 0 : self.ends[index]]


class Pairs(Dataset[dict[str, Tensor]]):
    """Pairs of sentences with masked words. The same index gives the same pair, on every worker.

    Args:
        text: the sentences.
        which: of ``text.firsts``.
        num_copies: of every pair, with other words masked and another second sentence.
    """

    def __init__(
        self, text: Sentences, which: range, args: argparse.Namespace, vocab_size: int, num_copies: int = 1
    ) -> None:
        self._text = text
        self._which = which
        self._length = args.seq_length
        self._num_masked = args.masked
        self._vocab_size = vocab_size
        self._num_copies = num_copies

    def __len__(self) -> int:
        return len(self._which) * self._num_copies

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        place = self._which[index % len(self._which)]
        random = np.random.default_rng([place, index // len(self._which)])
        first = int(self._text.firsts[place])
        is_other = int(random.random() < 0.5)
        second = int(random.integers(len(self._text.ends))) if is_other else first + 1
        a, b = self._text.sentence(first), self._text.sentence(second)
        a, b = fitted(a, b, self._length - 3)
        tokens = np.full(self._length, PAD)
        num_used = len(a) + len(b) + 3
        tokens[:num_used] = [CLS, *a, SEP, *b, SEP]
        labels = np.full(self._length, -100)
        words = np.flatnonzero(tokens >= len(SPECIAL))
        chosen = random.choice(words, min(self._num_masked, len(words)), replace=False)
        labels[chosen] = tokens[chosen]
        for position, drawn in zip(chosen, random.random(len(chosen)), strict=True):
            if drawn < 0.8:
                tokens[position] = MASK
            elif drawn < 0.9:
                tokens[position] = random.integers(len(SPECIAL), self._vocab_size)
        positions = np.arange(self._length)
        return {
            "input_ids": torch.from_numpy(tokens),
            "attention_mask": torch.from_numpy((positions < num_used).astype(np.int64)),
            "token_type_ids": torch.from_numpy(
                ((positions >= len(a) + 2) & (positions < num_used)).astype(np.int64)
            ),
            "labels": torch.from_numpy(labels),
            "next_sentence_label": torch.tensor(is_other),
        }


def fitted(a: np.ndarray, b: np.ndarray, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Both cut so that they fit, the longer one first."""
    longest_b = max(length // 2, length - len(a))
    b = b[:longest_b]
    return a[: length - len(b)], b


# --- training -------------------------------------------------------------------------------


def main() -> None:
    args = parse_arguments()
    disable_progress_bar()
    shape = SHAPES[args.size]
    prose = find_prose(args.data)
    key = hashlib.sha256(f"{prose.source} {shape['vocab_size']}".encode()).hexdigest()[:12]
    cache = made_once(args.save / "cache" / key, lambda folder: prepare(folder, prose, shape["vocab_size"]))
    text = Sentences.load(cache)
    border = len(text.firsts) * 19 // 20  # the last twentieth is for validation
    train = Pairs(text, range(border), args, shape["vocab_size"], num_copies=10)
    validation = Pairs(text, range(border, len(text.firsts)), args, shape["vocab_size"])
    shown = Subset(validation, range(min(args.eval_samples, len(validation))))
    config = BertConfig(
        **shape,
        intermediate_size=4 * shape["hidden_size"],
        max_position_embeddings=max(args.seq_length, 512 if args.size != "tiny" else 0),
        hidden_dropout_prob=args.dropout,
        attention_probs_dropout_prob=args.dropout,
    )
    torch.manual_seed(args.seed)
    with torch.device("cpu" if args.size == "tiny" else "meta"):  # without storage: each worker its own stage
        model = BertForPreTraining(config)
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
    if job.rank == 0:
        say(f"{len(text.firsts)} pairs of sentences from {prose.source}.")
        say(f"Model: {model.num_parameters() / 1e6:.1f} M parameters.")

    started_s = time.monotonic()
    losses: list[float] = []
    validation_losses: dict[int, float] = {}
    for step in job.train(args.steps):
        losses.append(step.loss)
        if (step.index + 1) % args.eval_every == 0 or step.index + 1 == args.steps:
            validation_losses[step.index + 1] = job.evaluate(shown)
    duration_s = time.monotonic() - started_s

    weights = job.full_state_dict()  # on worker 0; empty on the others
    if job.rank != 0:
        return
    whole = BertForPreTraining(config).eval()
    whole.load_state_dict(weights)
    words = BertTokenizerFast(tokenizer_file=str(cache / "tokenizer.json"))
    whole.save_pretrained(args.save / "model")
    words.save_pretrained(args.save / "model")
    summary = {
        "source": prose.source,
        "num_steps": args.steps,
        "duration_s": round(duration_s, 1),
        **rights(whole, shown),
        "train_losses": losses,
        "validation_losses": validation_losses,
    }
    (args.save / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    for sentence in SHOWN:
        say(f"{sentence}: {', '.join(guesses(whole, words, sentence))}")
    say(
        f"Validation loss {last_of(validation_losses):.3f}: {summary['words_right']:.1%} of masked words and "
        f"{summary['pairs_right']:.1%} of pairs are right. The most frequent word would be right for "
        f"{summary['most_frequent_word']:.1%}."
    )
    say(f"In {args.save.resolve()}: model, summary.json.")


def last_of(losses: dict[int, float]) -> float:
    """The last one."""
    return losses[max(losses)] if losses else float("nan")


def warm_up_then_down(step: int, num_steps: int) -> float:
    """Share of the highest learning rate: up over the first tenth, then down in a line."""
    warm_up = max(1, num_steps // 10)
    return (step + 1) / warm_up if step < warm_up else 1.0 - (step - warm_up) / max(1, num_steps - warm_up)


@torch.inference_mode()
def rights(model: BertForPreTraining, pairs: Dataset[dict[str, Tensor]]) -> dict[str, float]:
    """Shares of masked words and of pairs that the model guesses, and of the most frequent masked word."""
    words_right, pairs_right, targets = 0, 0, []
    for batch in DataLoader(pairs, 100):
        output = model(**batch)
        masked = batch["labels"] != -100
        words = batch["labels"][masked]
        words_right += int((output.prediction_logits[masked].argmax(-1) == words).sum())
        pairs_right += int((output.seq_relationship_logits.argmax(-1) == batch["next_sentence_label"]).sum())
        targets.append(words)
    all_words = torch.cat(targets)
    return {
        "words_right": words_right / len(all_words),
        "pairs_right": pairs_right / len(pairs),  # type: ignore[arg-type]
        "most_frequent_word": int(all_words.bincount().max()) / len(all_words),
    }


@torch.inference_mode()
def guesses(model: BertForPreTraining, words: BertTokenizerFast, sentence: str) -> list[str]:
    """The five likeliest words in place of the mask."""
    batch = words(sentence, return_tensors="pt")
    place = int((batch["input_ids"][0] == MASK).nonzero()[0])
    best = model(**batch).prediction_logits[0, place].topk(5).indices
    return words.convert_ids_to_tokens(best.tolist())


if __name__ == "__main__":
    main()
