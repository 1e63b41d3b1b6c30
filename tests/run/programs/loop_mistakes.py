"""Train with a custom loop whose body contains the mistake named by the argument."""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

data = TensorDataset(torch.randn(64, 3), torch.zeros(64))
model = nn.Linear(3, 1)
count = 0
"""Batches so far."""


def backward_and_step(loss: Tensor) -> None:
    loss.backward()
    run.step(loss)


def no_step(loss: Tensor) -> None:
    loss.backward()


def no_backward(loss: Tensor) -> None:
    run.step(loss)


def two_steps(loss: Tensor) -> None:
    backward_and_step(loss)
    run.step(loss)


def zero_grad(loss: Tensor) -> None:
    loss.backward()
    model.zero_grad()
    run.step(loss)


def two_backward(loss: Tensor) -> None:
    loss.backward(retain_graph=True)
    backward_and_step(loss)


def clip(loss: Tensor) -> None:
    loss.backward()
    nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    run.step(loss)


def optimizer_before_step(loss: Tensor) -> None:
    loss.backward()
    torch.optim.SGD(model.parameters(), 0.1).step()
    run.step(loss)


def optimizer_after_step(loss: Tensor) -> None:
    backward_and_step(loss)
    torch.optim.AdamW(model.parameters()).step()


def written(loss: Tensor) -> None:
    loss.backward()
    torch.nn.init.zeros_(model.bias)
    run.step(loss)


def renewed(loss: Tensor) -> None:
    loss.backward()
    model.weight.data = model.weight.data.clone()
    run.step(loss)


def frozen(loss: Tensor) -> None:
    backward_and_step(loss)
    model.bias.requires_grad = count < 3


def scaler(loss: Tensor) -> None:
    scaler = torch.amp.GradScaler("cpu")
    scaler.scale(loss).backward()
    run.step(loss)


def two_loops(loss: Tensor) -> None:
    backward_and_step(loss)
    if run.transport.rank == 2 and count == 5:
        run.batches(data)


def exception(loss: Tensor) -> None:
    backward_and_step(loss)
    if run.transport.rank == 2 and count == 5:
        raise ZeroDivisionError


BODIES: list[Callable[[Tensor], None]] = [
    *(no_step, no_backward, two_steps, zero_grad, two_backward, clip),
    *(optimizer_before_step, optimizer_after_step, written, renewed, frozen, scaler),
    *(two_loops, exception),
]
body = {each.__name__: each for each in BODIES}[sys.argv[1]]
run = DataParallel(model, samples=100_000, batch_size=8, run_dir="run", quiet=True)
for inputs, _ in run.batches(data):
    count += 1
    body(model(inputs).square().mean())
print("after the loop", flush=True)
