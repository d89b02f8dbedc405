"""Options of ``gpt.py`` and of its twin without Varuna, ``gpt_plain.py``: sizes by one flag, Megatron's names.

Sizes are those of the Varuna paper's tables (the shapes of GPT-2 and Megatron-LM) and two smaller ones. An
option that is given overrides what ``--size`` says.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch
from common import fast_precision
from gpt_model import GPTConfig
from text_data import TokenBlocks
from torch import nn
from torch.utils.data import Dataset, Subset


@dataclass(frozen=True, kw_only=True)
class Size:
    """A model, and how it is trained unless said otherwise.

    Attributes:
        num_layers: blocks.
        hidden_size: C, width of a token.
        num_attention_heads: H.
        seq_length: T, tokens of a sample.
        vocab_size: rows of the embedding.
        global_batch_size: samples of an update.
        lr: highest learning rate.
        train_iters: updates.
        data_mb: most megabytes of text.
        profile: name for ``varuna plan``, if there is a ready one.
    """

    num_layers: int
    hidden_size: int
    num_attention_heads: int
    seq_length: int = 1024
    vocab_size: int = 50257
    global_batch_size: int = 512
    lr: float
    train_iters: int = 300_000
    data_mb: float = 1e6
    profile: str | None = None


SIZES = {
    "10m": Size(
        num_layers=5, hidden_size=384, num_attention_heads=6, seq_length=128, vocab_size=1024,
        global_batch_size=16, lr=1e-3, train_iters=120, data_mb=2.0,
    ),
    "125m": Size(num_layers=12, hidden_size=768, num_attention_heads=12, lr=6e-4),
    "355m": Size(num_layers=24, hidden_size=1024, num_attention_heads=16, lr=3e-4, profile="gpt2-355m"),
    "1.5b": Size(num_layers=48, hidden_size=1600, num_attention_heads=25, lr=2e-4, profile="gpt2-1.5b"),
    "2.5b": Size(
        num_layers=54, hidden_size=1920, num_attention_heads=20, vocab_size=51200, global_batch_size=8192,
        lr=1.6e-4, profile="gpt2-2.5b",
    ),
    "8.3b": Size(
        num_layers=72, hidden_size=3072, num_attention_heads=32, vocab_size=51200, global_batch_size=8192,
        lr=1.2e-4, profile="gpt2-8.3b",
    ),
}  # fmt: skip


def parse_arguments(
    description: str, save: str, more: Callable[[argparse.ArgumentParser], None] | None = None
) -> argparse.Namespace:
    """What the command line says, completed by the size.

    Args:
        description: of the script.
        save: default of ``--save``.
        more: adds the script's own options.
    """
    parser = argparse.ArgumentParser(
        description=description, formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    for add in (_add_model, _add_training, _add_reports, more):
        if add is not None:
            add(parser)
    parser.set_defaults(save=Path(save))
    args = parser.parse_args()
    for name, value in vars(SIZES[args.size]).items():
        if getattr(args, name, None) is None:
            setattr(args, name, value)
    args.min_lr = args.lr / 10 if args.min_lr is None else args.min_lr
    args.lr_warmup = max(1, args.train_iters // 10) if args.lr_warmup is None else args.lr_warmup
    args.precision = fast_precision() if args.precision == "auto" else args.precision
    return args


def _add_model(parser: argparse.ArgumentParser) -> None:
    by_size = "(default: by --size)"
    parser.add_argument("--size", choices=list(SIZES), default="10m", help="of the model")
    parser.add_argument("--num-layers", "--layers", type=int, help=by_size, default=argparse.SUPPRESS)
    parser.add_argument("--hidden-size", "--width", type=int, help=by_size, default=argparse.SUPPRESS)
    parser.add_argument("--num-attention-heads", "--heads", type=int, help=by_size, default=argparse.SUPPRESS)
    parser.add_argument("--seq-length", type=int, help=by_size, default=argparse.SUPPRESS)
    parser.add_argument(
        "--vocab-size", type=int, help=f"rows of the embedding {by_size}", default=argparse.SUPPRESS
    )
    parser.add_argument("--dropout", "--hidden-dropout", type=float, default=0.0, help="in every block")


def _add_training(parser: argparse.ArgumentParser) -> None:
    by_size = "(default: by --size)"
    parser.add_argument(
        "--data",
        "--data-path",
        help="text file, folder, or .npy file of token ids; else Python's own text",
    )
    parser.add_argument(
        "--data-mb", type=float, help=f"most megabytes of text {by_size}", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--train-iters", "--steps", type=int, help=f"updates {by_size}", default=argparse.SUPPRESS
    )
    parser.add_argument(
        "--global-batch-size", "--batch-size", type=int, help=f"sequences {by_size}", default=argparse.SUPPRESS
    )
    parser.add_argument("--lr", type=float, help=f"highest learning rate {by_size}", default=argparse.SUPPRESS)
    parser.add_argument("--min-lr", type=float, help="at the end; a tenth of --lr if not given")
    parser.add_argument(
        "--lr-warmup", "--lr-warmup-iters", type=int, help="updates; a tenth of all if not given"
    )
    parser.add_argument("--lr-decay-style", choices=["constant", "linear", "cosine"], default="linear")
    parser.add_argument("--weight-decay", type=float, default=0.1, help="of matrices")
    parser.add_argument("--adam-beta1", type=float, default=0.9)
    parser.add_argument("--adam-beta2", type=float, default=0.95)
    parser.add_argument("--clip-grad", type=float, default=1.0, help="largest norm of the gradient")
    parser.add_argument("--precision", default="auto", help="fp32, bf16, fp16, or auto: bf16 where it is fast")
    for name in ("fp16", "bf16"):
        parser.add_argument(
            f"--{name}", dest="precision", action="store_const", const=name, default=argparse.SUPPRESS,
            help=f"--precision {name}",
        )  # fmt: skip
    parser.add_argument("--seed", type=int, default=0)


def _add_reports(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--eval-interval", "--eval-every", type=int, default=40, help="updates between validations"
    )
    parser.add_argument("--eval-samples", type=int, default=64, help="sequences in a validation")
    parser.add_argument("--sample-tokens", type=int, default=200, help="tokens to write at the end")
    parser.add_argument("--prompt", default="The ", help="how the text begins")
    parser.add_argument("--save", "--save-dir", type=Path, help="folder of results")


def model_config(args: argparse.Namespace) -> GPTConfig:
    return GPTConfig(
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        num_layers=args.num_layers,
        width=args.hidden_size,
        num_heads=args.num_attention_heads,
        dropout=args.dropout,
    )


def make_optimizer(parameters: Iterable[nn.Parameter], args: argparse.Namespace) -> torch.optim.AdamW:
    """AdamW; biases and norms do not decay."""
    matrices, others = [], []
    for parameter in parameters:
        (matrices if parameter.dim() > 1 else others).append(parameter)
    groups = [
        {"params": matrices, "weight_decay": args.weight_decay},
        {"params": others, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=args.lr, betas=(args.adam_beta1, args.adam_beta2))


def lr_share(step: int, args: argparse.Namespace) -> float:
    """Share of the highest learning rate at an update: up in a line, then down in the way that was chosen."""
    if step < args.lr_warmup:
        return (step + 1) / args.lr_warmup
    done = min(1.0, (step - args.lr_warmup) / max(1, args.train_iters - args.lr_warmup))
    left = {"constant": 1.0, "linear": 1.0 - done, "cosine": (1.0 + math.cos(math.pi * done)) / 2}
    lowest = args.min_lr / args.lr
    return lowest + (1.0 - lowest) * left[args.lr_decay_style]


def spread(dataset: TokenBlocks, num_samples: int) -> Dataset:
    """``num_samples`` of the dataset at equal distances."""
    count = min(num_samples, len(dataset))
    return Subset(dataset, [index * len(dataset) // count for index in range(count)])
