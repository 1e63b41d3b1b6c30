"""Fine-tune a GPT-2 on lines of Python with Hugging Face's Trainer.

python finetune.py
"""

from __future__ import annotations

import ast
import inspect

import torch
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments

LONGEST = 64


def lines() -> list[dict[str, list[int]]]:
    """Return the lines of a module as sequences of bytes."""
    texts = inspect.getsource(ast).splitlines()
    return [{"input_ids": list(text.encode()[:LONGEST])} for text in texts if text.strip()]


def collate(items: list[dict[str, list[int]]]) -> dict[str, Tensor]:
    """Pad lines of different lengths; label -100 is ignored."""
    longest = max(len(item["input_ids"]) for item in items)
    rows = [item["input_ids"] + [-100] * (longest - len(item["input_ids"])) for item in items]
    labels = torch.tensor(rows)
    return {
        "input_ids": labels.clamp(min=0),
        "attention_mask": (labels >= 0).long(),
        "labels": labels,
    }


def main() -> None:
    """Train, and evaluate after each epoch."""
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=256,
        n_positions=LONGEST,
        n_embd=32,
        n_layer=1,
        n_head=2,
        bos_token_id=0,
        eos_token_id=0,
    )
    data = lines()[:600]
    args = TrainingArguments(
        "finetuned",
        num_train_epochs=2,
        per_device_train_batch_size=8,
        learning_rate=1e-2,
        warmup_steps=10,
        eval_strategy="epoch",
        report_to="none",
    )
    trainer = Trainer(
        model=GPT2LMHeadModel(config),
        args=args,
        data_collator=collate,
        train_dataset=data[100:],
        eval_dataset=data[:100],
    )
    trainer.train()
    trainer.save_model()


if __name__ == "__main__":
    main()
