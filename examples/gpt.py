"""Train a GPT on real text, on any number of workers, and let it write.

    varuna run --workers 4 --stages 2 examples/gpt.py            # 2 stages x 2 pipelines on this machine
    python examples/gpt.py --steps 20                            # the same script, one worker
    varuna run --workers 4 examples/gpt.py --data ~/books --steps 2000 --save-dir runs/books

The defaults train a model of 10 million parameters for a few minutes on two cores. The weights
(``model.safetensors``), the settings and losses (``summary.json``) and the text it wrote (``sample.txt``) go to
``--save-dir``.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict
from pathlib import Path

import torch
from gpt_model import GPT, GPTConfig
from safetensors.torch import save_model
from text_data import TextData, TokenBlocks, load_text
from torch.utils.data import Dataset, Subset

import varuna


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description="Train a GPT on text.", formatter_class=argparse.ArgumentDefaultsHelpFormatter
    )
    parser.add_argument("--data", help="text file or folder; else the Python documentation or standard library")
    parser.add_argument("--data-mb", type=float, default=2.0, help="take at most this many megabytes of text")
    parser.add_argument("--steps", type=int, default=120, help="optimizer updates")
    parser.add_argument("--batch-size", type=int, default=16, help="sequences in a global batch")
    parser.add_argument("--seq-length", type=int, default=128, help="tokens in a sequence")
    parser.add_argument("--vocab-size", type=int, default=1024, help="tokens of the byte pair encoding")
    parser.add_argument("--layers", type=int, default=5)
    parser.add_argument("--width", type=int, default=384)
    parser.add_argument("--heads", type=int, default=6)
    parser.add_argument("--dropout", type=float, default=0.0)
    parser.add_argument("--lr", type=float, default=1e-3, help="highest learning rate")
    parser.add_argument("--precision", default="auto", help="fp32, bf16, fp16, or auto: bf16 where it is fast")
    parser.add_argument("--eval-every", type=int, default=40, help="steps between validations")
    parser.add_argument("--eval-samples", type=int, default=64, help="sequences in a validation")
    parser.add_argument("--sample-tokens", type=int, default=200, help="tokens to write at the end")
    parser.add_argument("--prompt", default="The ", help="how the text begins")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--save-dir", type=Path, default=Path("runs/gpt"))
    return parser.parse_args()


def main() -> None:
    args = parse_arguments()
    data = load_text(
        args.data,
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        max_bytes=int(args.data_mb * 1e6),
        cache_dir=args.save_dir / "cache",
    )
    validation = spread(data.validation, args.eval_samples)
    config = GPTConfig(
        vocab_size=data.tokenizer.vocab_size,
        seq_length=args.seq_length,
        num_layers=args.layers,
        width=args.width,
        num_heads=args.heads,
        dropout=args.dropout,
    )
    torch.manual_seed(args.seed)
    model = GPT(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, betas=(0.9, 0.95), weight_decay=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: warm_up_then_down(step, args.steps))
    job = varuna.Varuna(
        model,
        optimizer,
        data.train,
        batch_size=args.batch_size,
        lr_scheduler=scheduler,
        precision=fast_precision() if args.precision == "auto" else args.precision,
        clip_grad_norm=1.0,
        seed=args.seed,
    )
    if job.rank == 0:
        say(f"Text: {data.num_bytes / 1e6:.1f} MB from {data.source}.")
        say(f"Model: {num_parameters / 1e6:.1f} M parameters, {args.layers} blocks of width {args.width}.")

    started_s = time.monotonic()
    losses: list[float] = []
    validation_losses: dict[int, float] = {}
    for step in job.train(args.steps):
        losses.append(step.loss)
        if (step.index + 1) % args.eval_every == 0 or step.index + 1 == args.steps:
            validation_losses[step.index + 1] = job.evaluate(validation)
    duration_s = time.monotonic() - started_s

    weights = job.full_state_dict()  # on worker 0; empty on the others
    if job.rank != 0:  # asked now: whoever was worker 0 at the start may be gone
        return
    whole = GPT(config).eval()
    whole.load_state_dict(weights)
    text = write_sample(whole, data, args)
    bytes_per_token = data.tokenizer.num_bytes(data.validation.tokens) / len(data.validation.tokens)
    last = validation_losses[max(validation_losses)] if validation_losses else float("nan")
    summary = {
        "source": data.source,
        "model": asdict(config),
        "num_parameters": num_parameters,
        "num_steps": args.steps,
        "batch_size": args.batch_size,
        "lr": args.lr,
        "seed": args.seed,
        "duration_s": round(duration_s, 1),
        "tokens_per_s": round(args.steps * args.batch_size * args.seq_length / duration_s),
        "train_losses": losses,
        "validation_losses": validation_losses,
        "validation_loss_per_byte": last / bytes_per_token,
    }
    args.save_dir.mkdir(parents=True, exist_ok=True)
    save_model(whole, str(args.save_dir / "model.safetensors"))
    (args.save_dir / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    (args.save_dir / "sample.txt").write_text(text + "\n")

    say(f"\n--- the model writes ---\n{text}\n------------------------")
    say(f"Validation loss {last:.3f} nats a token, {last / bytes_per_token:.3f} nats a byte.")
    say(f"In {args.save_dir.resolve()}: model.safetensors, summary.json, sample.txt.")


def spread(dataset: TokenBlocks, num_samples: int) -> Dataset:
    """``num_samples`` of the dataset at equal distances."""
    count = min(num_samples, len(dataset))
    return Subset(dataset, [index * len(dataset) // count for index in range(count)])


def warm_up_then_down(step: int, num_steps: int) -> float:
    """Share of the highest learning rate: up over the first tenth, then down in a line to a tenth."""
    warm_up = max(1, num_steps // 10)
    if step < warm_up:
        return (step + 1) / warm_up
    return 1.0 - 0.9 * (step - warm_up) / max(1, num_steps - warm_up)


def fast_precision() -> str:
    """bf16 on a GPU, or on a CPU that multiplies in it; else fp32."""
    if torch.cuda.is_available():
        return "bf16"
    cpu = Path("/proc/cpuinfo")
    flags = cpu.read_text() if cpu.exists() else ""
    return "bf16" if "avx512_bf16" in flags or "amx_bf16" in flags else "fp32"


def write_sample(model: GPT, data: TextData, args: argparse.Namespace) -> str:
    """Text of ``--sample-tokens`` tokens after the prompt."""
    tokens = torch.from_numpy(data.tokenizer.encode(args.prompt).astype("int64"))[None]
    written = model.generate(tokens, args.sample_tokens, temperature=0.7, top_k=20, seed=args.seed)
    return data.tokenizer.decode(written[0].tolist())


def say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
