r"""Train a GPT on real text, on any number of workers, and let it write.

    varuna run --workers 4 --stages 2 examples/gpt.py            # 2 stages x 2 pipelines on this machine
    python examples/gpt.py --steps 20                            # the same script, one worker
    varuna run --workers 4 examples/gpt.py --data ~/books --train-iters 2000 --save runs/books

The defaults train a model of 10 million parameters for two minutes on two cores. The weights
(``model.safetensors``), the settings and losses (``summary.json``) and the text it wrote (``sample.txt``) go to
``--save``. ``gpt_plain.py`` is the same training without Varuna.

Scale it up with one flag, which sets the model, batch, learning rate and length; options override it:

    python examples/gpt.py --size 8.3b --describe                # what it needs, and how to ask for a plan
    varuna run --hosts machines.txt --checkpoint s3://bucket/gpt examples/gpt.py --size 2.5b --fp16 \
        --data tokens.npy --lr-decay-style cosine --lr-warmup 3000 --eval-interval 1000

Larger models are built without storage: each worker makes and holds its own stage only. ``--data`` takes token
ids from any tokenizer, one row of integers as ``numpy.save`` writes it; the file is read as it is needed.
"""

from __future__ import annotations

import argparse
import json
import math
import time
from dataclasses import asdict

import torch
from common import say
from gpt_model import GPT, GPTConfig
from gpt_options import SIZES, lr_share, make_optimizer, model_config, parse_arguments, spread
from safetensors.torch import save_model
from text_data import TextData, load_text
from torch import Tensor, nn

import varuna

MOST_ON_EVERY_WORKER = 200_000_000
"""Parameters. A larger model is not built whole on each worker, but by stages."""


def main() -> None:
    args = parse_arguments("Train a GPT on text.", save="runs/gpt", more=add_options)
    config = model_config(args)
    if args.describe:
        describe(config, args)
        return
    data = load_text(
        args.data,
        vocab_size=args.vocab_size,
        seq_length=args.seq_length,
        max_bytes=int(args.data_mb * 1e6),
        cache_dir=args.save / "cache",
    )
    validation = spread(data.validation, args.eval_samples)
    torch.manual_seed(args.seed)
    with torch.device("meta" if config.num_parameters > MOST_ON_EVERY_WORKER else "cpu"):
        model = GPT(config)
    optimizer = make_optimizer(model.parameters(), args)
    job = varuna.Varuna(
        model,
        optimizer,
        data.train,
        batch_size=args.global_batch_size,
        lr_scheduler=torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: lr_share(step, args)),
        precision=args.precision,
        clip_grad_norm=args.clip_grad,
        seed=args.seed,
        cut_points=[f"blocks.{index}" for index in range(args.num_layers)],
        init_weights=init_weights,
    )
    if job.rank == 0:
        say(f"Text: {data.num_bytes / 1e6:.1f} MB from {data.source}.")
        size = f"{config.num_parameters / 1e6:.1f} M parameters"
        say(f"Model: {size}, {config.num_layers} blocks of width {config.width}.")

    started_s = time.monotonic()
    losses: list[float] = []
    validation_losses: dict[int, float] = {}
    for step in job.train(args.train_iters):
        losses.append(step.loss)
        num_done = step.index + 1
        if num_done % args.eval_interval == 0 or num_done == args.train_iters:
            validation_losses[num_done] = loss = job.evaluate(validation)
            if job.rank == 0:
                say(f"Validation after step {num_done}: loss {loss:.3f}, perplexity {math.exp(loss):.1f}.")
    duration_s = time.monotonic() - started_s

    weights = job.full_state_dict() if args.export else {}  # on worker 0; empty on the others
    if job.rank == 0:  # asked now: whoever was worker 0 at the start may be gone
        results = {
            "duration_s": round(duration_s, 1),
            "tokens_per_s": round(args.train_iters * args.global_batch_size * args.seq_length / duration_s),
            "train_losses": losses,
            "validation_losses": validation_losses,
        }
        finish(config, weights, data, results, args)


def add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--describe", action="store_true", help="say what the size needs; train nothing")
    parser.add_argument(
        "--export", action=argparse.BooleanOptionalAction, default=True, help="bring all weights to worker 0"
    )


def init_weights(module: nn.Module) -> None:
    """For models that are built without storage: called for every module that gets it."""
    if isinstance(module, GPT):
        module.init_weights()


def describe(config: GPTConfig, args: argparse.Namespace) -> None:
    """Size and memory of the model, which is built without storage, and the command that plans it."""
    with torch.device("meta"):
        model = GPT(config)
    num_parameters = sum(parameter.numel() for parameter in model.parameters())
    say(
        f"{args.size}: {args.num_layers} blocks of width {config.width} with {config.num_heads} heads, "
        f"{config.seq_length} tokens, {config.vocab_size} rows of the embedding.\n"
        f"{num_parameters / 1e9:.3f} billion parameters: {16 * num_parameters / 1e9:.1f} GB with gradients and "
        f"AdamW's state, divided among the stages of a pipeline.\n"
        f"Batch {args.global_batch_size}, learning rate {args.lr:g}."
    )
    profile = SIZES[args.size].profile
    batch = f"--batch-size {args.global_batch_size}"
    if profile is not None:
        say(f"Ask for a plan: varuna plan {profile}@v100 --machines 16x4 {batch}")
    else:
        say(f"Measure it: varuna profile -o {args.size}.json examples/gpt.py --size {args.size}")
        say(f"Ask for a plan: varuna plan {args.size}.json --machines 4 {batch}")


def finish(
    config: GPTConfig,
    weights: dict[str, Tensor],
    data: TextData,
    results: dict[str, object],
    args: argparse.Namespace,
) -> None:
    """Save what came out, say how good it is, and let the model write."""
    losses: dict[int, float] = results["validation_losses"]  # type: ignore[assignment]
    last = losses[max(losses)] if losses else float("nan")
    told = f"Validation loss {last:.3f} nats a token (perplexity {math.exp(last):.1f})"
    summary = {
        "source": data.source,
        "model": asdict(config),
        "num_parameters": config.num_parameters,
        "num_steps": args.train_iters,
        "batch_size": args.global_batch_size,
        "lr": args.lr,
        "seed": args.seed,
        **results,
        "validation_perplexity": math.exp(last),
    }
    if data.tokenizer is not None:
        bytes_per_token = data.tokenizer.num_bytes(data.validation.tokens) / len(data.validation.tokens)
        summary["validation_loss_per_byte"] = last / bytes_per_token
        told += f", {last / bytes_per_token:.3f} nats a byte"
    args.save.mkdir(parents=True, exist_ok=True)
    (args.save / "summary.json").write_text(json.dumps(summary, indent=2) + "\n")
    files = ["summary.json"]
    if weights:
        with torch.device("meta"):
            whole = GPT(config).eval()
        whole.load_state_dict(weights, assign=True)
        whole.head.weight = whole.embedding.weight
        save_model(whole, str(args.save / "model.safetensors"))
        files.append("model.safetensors")
        if data.tokenizer is not None:
            text = write_sample(whole, data, args)
            (args.save / "sample.txt").write_text(text + "\n")
            files.append("sample.txt")
            say(f"\n--- the model writes ---\n{text}\n------------------------")
    say(f"{told}.")
    say(f"In {args.save.resolve()}: {', '.join(files)}.")


def write_sample(model: GPT, data: TextData, args: argparse.Namespace) -> str:
    """Text of ``--sample-tokens`` tokens after the prompt."""
    words = data.tokenizer
    assert words is not None
    tokens = torch.from_numpy(words.encode(args.prompt).astype("int64"))[None]
    written = model.generate(
        tokens, args.sample_tokens, temperature=0.7, top_k=20, seed=args.seed, vocab_size=words.vocab_size
    )
    return words.decode(written[0].tolist())


if __name__ == "__main__":
    main()
