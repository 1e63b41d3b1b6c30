"""Train a small BERT with Hugging Face's accelerate, or with this project as a replacement.

Arguments: ``real`` or an algorithm, and ``leave`` to end the loop after three of four epochs, or
``suspend`` to send a signal to this process in the second one.
"""

from __future__ import annotations

import signal
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader
from transformers import (
    BertConfig,
    BertForSequenceClassification,
    get_linear_schedule_with_warmup,
)

algorithm, epochs = sys.argv[1], 4
accelerator: Any
if algorithm == "real":
    import accelerate

    accelerator = accelerate.Accelerator(cpu=True, gradient_accumulation_steps=2)
else:
    from aladdin_mpi import Accelerator

    accelerator = Accelerator(
        gradient_accumulation_steps=2, algorithm=algorithm, epochs=epochs, run_dir=algorithm
    )

torch.manual_seed(0)
words = torch.randint(1, 50, (96, 12))
data: Any = [
    {"input_ids": each, "attention_mask": torch.ones_like(each), "labels": (each[0] > 25).long()}
    for each in words
]
config = BertConfig(
    vocab_size=50,
    hidden_size=32,
    num_hidden_layers=1,
    num_attention_heads=4,
    intermediate_size=64,
    max_position_embeddings=16,
    hidden_dropout_prob=0.0,
    attention_probs_dropout_prob=0.0,
)
model = BertForSequenceClassification(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
loader: Any = DataLoader(data, 8)
test: Any = DataLoader(data, 32)
scheduler = get_linear_schedule_with_warmup(optimizer, 2, epochs * len(loader) // 2)
model, optimizer, loader, test, scheduler = accelerator.prepare(
    model, optimizer, loader, test, scheduler
)
for epoch in range(epochs):
    model.train()
    for batch in loader:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            scheduler.step()
            optimizer.zero_grad()
        if epoch == 1 and sys.argv[2:] == ["suspend"]:
            signal.raise_signal(signal.SIGUSR1)
    model.eval()
    with torch.no_grad():
        losses = [accelerator.gather_for_metrics(model(**each).loss.reshape(1)) for each in test]
    accelerator.print(f"epoch {epoch}: {torch.cat(losses).mean():.6f}")
    if epoch == 2 and sys.argv[2:] == ["leave"]:
        break
accelerator.wait_for_everyone()
accelerator.end_training()
