"""Train a network with batch norm, and print its accuracy on every rank and from the file.

Arguments: the algorithm; ``evaluated`` or ``unevaluated``; ``whole`` or ``layers``, the module that
the loop calls.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn

from aladdin_mpi import DataParallel, load_dataset

algorithm, evaluation, called = sys.argv[1:]


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(1, 16, 3, padding=1),
            nn.BatchNorm2d(16),
            nn.ReLU(),
            nn.MaxPool2d(2),
            nn.Flatten(),
            nn.Linear(256, 64),
            nn.BatchNorm1d(64),
            nn.ReLU(),
            nn.Linear(64, 10),
        )

    def forward(self, *, images: Tensor, scale: float) -> Tensor:
        outputs: Tensor = self.layers(images * scale)
        return outputs


data = load_dataset("digits")
test_set: Any = data.test
pixels, names = (
    torch.stack(list(map(torch.as_tensor, each))) for each in zip(*test_set, strict=True)
)


def accuracy(model: nn.Module) -> float:
    outputs = model(images=pixels, scale=2.0)
    return float((outputs.argmax(1) == names).float().mean())


def evaluate(model: nn.Module) -> dict[str, float]:
    assert not model.training and not torch.is_grad_enabled()
    return {"test_accuracy": accuracy(model)}


model = Net()
run = DataParallel(
    model,
    algorithm=algorithm,
    epochs=4,
    batch_size=32,
    lr=0.05,
    run_dir="run",
    quiet=True,
    eval_every=1,
    evaluate=evaluate if evaluation == "evaluated" else None,
)
for images, labels in run.batches(data.train):
    outputs = model(images=images, scale=2.0) if called == "whole" else model.layers(images * 2.0)
    loss = nn.functional.cross_entropy(outputs, labels)
    loss.backward()
    run.step(loss)
model.eval()
sums = sum(buffer.sum().item() for buffer in model.buffers())
print(f"rank {run.transport.rank} {accuracy(model)} {sums}", flush=True)
if run.transport.rank == 0:
    model.load_state_dict(torch.load("run/model.pt"))
    print(f"file {accuracy(model)}", flush=True)
