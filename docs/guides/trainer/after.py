"""Fine-tune a causal language model on a text file."""

import argparse

import torch
import transformers
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, default_data_collator

import varuna

parser = argparse.ArgumentParser()
parser.add_argument("model")
parser.add_argument("text")
parser.add_argument("--output", default="tuned")
args = parser.parse_args()

transformers.set_seed(0)
tokenizer = AutoTokenizer.from_pretrained(args.model)
with open(args.text) as file:
    ids = tokenizer(file.read())["input_ids"]
rows = [ids[start : start + 64] for start in range(0, len(ids) - 63, 64)]
samples = [{"input_ids": row, "labels": row} for row in rows]
train, validation = samples[:-64], samples[-64:]

with torch.device("meta"):
    model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(args.model))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.0)
job = varuna.Varuna(
    model,
    optimizer,
    train,
    batch_size=32,
    lr_scheduler=transformers.get_cosine_schedule_with_warmup(optimizer, 4, 40),
    clip_grad_norm=1.0,
    collate_fn=default_data_collator,
)
job.load_pretrained(args.model)
for _ in job.train(40):
    pass
loss = job.evaluate(validation)
weights = job.full_state_dict()
if job.rank == 0:
    print(f"validation loss {loss:.3f}")
    whole = AutoModelForCausalLM.from_config(model.config)
    whole.load_state_dict(weights)
    whole.save_pretrained(args.output)
    tokenizer.save_pretrained(args.output)
