"""Classify digits with Hugging Face accelerate: accumulation, clipping, scheduler, evaluation.

mpirun -np 3 python accelerate_digits.py
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.nn import functional
from torch.optim.lr_scheduler import OneCycleLR
from torch.utils.data import DataLoader

from aladdin_mpi import Accelerator, load_dataset

EPOCHS = 5


def main() -> None:
    """Train, and test after each epoch."""
    accelerator = Accelerator(gradient_accumulation_steps=2, mixed_precision="bf16", epochs=EPOCHS)
    torch.manual_seed(0)
    data: Any = load_dataset("digits")
    loader: Any = DataLoader(data.train, 16, shuffle=True)
    test_loader: Any = DataLoader(data.test, 256)
    model = nn.Sequential(nn.Flatten(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, 10))
    optimizer = torch.optim.AdamW(model.parameters())
    steps = EPOCHS * len(loader) // 2
    scheduler = OneCycleLR(optimizer, 0.01, total_steps=steps)
    model, optimizer, loader, test_loader, scheduler = accelerator.prepare(
        model, optimizer, loader, test_loader, scheduler
    )
    for epoch in range(EPOCHS):
        model.train()
        for images, labels in loader:
            with accelerator.accumulate(model):
                loss = functional.cross_entropy(model(images), labels)
                accelerator.backward(loss)
                if accelerator.sync_gradients:
                    accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        correct, count = 0, 0
        for images, labels in test_loader:
            with torch.no_grad():
                answers = model(images).argmax(1)
            answers, labels = accelerator.gather_for_metrics((answers, labels))
            correct += (answers == labels).sum().item()
            count += len(labels)
        accelerator.print(f"epoch {epoch}: {correct / count:.3f} of {count} digits")
    accelerator.wait_for_everyone()
    if accelerator.is_main_process:
        torch.save(accelerator.unwrap_model(model).state_dict(), "digits.pt")
    accelerator.end_training()


if __name__ == "__main__":
    main()
