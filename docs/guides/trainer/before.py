"""Fine-tune a causal language model on a text file."""

import argparse

import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainingArguments, default_data_collator

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

model = AutoModelForCausalLM.from_pretrained(args.model)
trainer = Trainer(
    model,
    TrainingArguments(
        output_dir=args.output,
        max_steps=40,
        per_device_train_batch_size=8,
        gradient_accumulation_steps=4,
        learning_rate=1e-3,
        lr_scheduler_type="cosine",
        warmup_steps=4,
        max_grad_norm=1.0,
        logging_steps=10,
        save_strategy="no",
        report_to="none",
        dataloader_pin_memory=False,
    ),
    train_dataset=train,
    eval_dataset=validation,
    data_collator=default_data_collator,
)
trainer.train()
print(f"validation loss {trainer.evaluate()['eval_loss']:.3f}")
trainer.save_model()
tokenizer.save_pretrained(args.output)
