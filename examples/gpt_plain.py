"""The training of ``gpt.py`` as an ordinary loop in one process: its twin, to compare with. Varuna is not used.

    python examples/gpt_plain.py

It has the same model, options and number of samples a step. Only the order of samples is another: that of
torch's own ``DataLoader``. Losses go to ``--save`` as ``summary.json``.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator

import torch
from common import say
from gpt_model import GPT
from gpt_options import lr_share, make_optimizer, model_config, parse_arguments, spread
from text_data import load_text
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

MICRO_BATCH_SIZE = 4


def main() -> None:
    args = parse_arguments("Train a GPT on text, without Varuna.", save="runs/gpt-plain")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    data = load_text(
        args.data,
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        max_bytes=int(args.data_mb * 1e6),
        cache_dir=args.save / "cache",
    )
    validation = spread(data.validation, args.eval_samples)
    torch.manual_seed(args.seed)
    model = GPT(model_config(args)).to(device)
    optimizer = make_optimizer(model.parameters(), args)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, args))
    number_format = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}[args.precision]
    autocast = torch.autocast(device, number_format, enabled=args.precision != "fp32")
    scaler = torch.amp.GradScaler(device, enabled=args.precision == "fp16")
    micro_batches = endless(data.train, args.seed)
    num_micro_batches = args.global_batch_size // MICRO_BATCH_SIZE

    started_s = time.monotonic()
    losses: list[float] = []
    validation_losses: dict[int, float] = {}
    for num_done in range(1, args.train_iters + 1):
        loss_sum = 0.0
        for _ in range(num_micro_batches):
            tokens, targets = next(micro_batches)
            with autocast:
                loss = model(tokens.to(device), targets.to(device)) / num_micro_batches
            scaler.scale(loss).backward()
            loss_sum += loss.item()
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), args.clip_grad)
        scaler.step(optimizer)
        scaler.update()
        scheduler.step()
        optimizer.zero_grad()
        losses.append(loss_sum)
        if num_done % args.eval_interval == 0 or num_done == args.train_iters:
            validation_losses[num_done] = loss_sum = evaluate(model, validation, autocast, device)
            say(f"Validation after step {num_done}: loss {loss_sum:.3f}, perplexity {math.exp(loss_sum):.1f}.")
    duration_s = time.monotonic() - started_s
    summary = {
        "num_steps": args.train_iters,
        "duration_s": round(duration_s, 1),
        "tokens_per_s": round(args.train_iters * args.global_batch_size * args.seq_length / duration_s),
        "train_losses": losses,
        "validation_losses": validation_losses,
    }
    args.save.mkdir(parents=True, exist_ok=True)
    (args.save / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")


def endless(dataset: Dataset, seed: int) -> Iterator[tuple[Tensor, Tensor]]:
    """Micro-batches, one epoch after another, each in an order of its own."""
    generator = torch.Generator().manual_seed(seed)
    loader = DataLoader(dataset, MICRO_BATCH_SIZE, shuffle=True, drop_last=True, generator=generator)
    while True:
        yield from loader


@torch.inference_mode()
def evaluate(model: GPT, dataset: Dataset, autocast: torch.autocast, device: str) -> float:
    """Mean loss of all samples, each once."""
    model.eval()
    loss_sum, num_samples = 0.0, 0
    for tokens, targets in DataLoader(dataset, MICRO_BATCH_SIZE):
        with autocast:
            loss_sum += model(tokens.to(device), targets.to(device)).item() * len(tokens)
        num_samples += len(tokens)
    model.train()
    return loss_sum / num_samples


if __name__ == "__main__":
    main()
