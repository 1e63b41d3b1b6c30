"""Train on islands by a loop of this kind; print the result of each rank.

Arguments: the kind of loop, the algorithm, and the number of samples.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

kind, algorithm, samples = sys.argv[1], sys.argv[2], int(sys.argv[3])
inputs = torch.randn(96, 6, generator=torch.Generator().manual_seed(5))
torch.manual_seed(8)
model = nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6))
run = DataParallel(
    model, algorithm=algorithm, samples=samples, batch_size=8, lr=0.01, quiet=True, eval_every=0
)


def clamp(name: str, values: Tensor) -> None:
    values.clamp_(-0.1, 0.1)


if kind == "project":
    run.project(clamp)


def flat() -> Tensor:
    return torch.cat([each.detach().flatten() for each in model.parameters()])


def step(batch: Tensor) -> None:
    loss = 10 * (model(batch) - batch.flip(1)).square().mean()
    loss.backward()
    if kind in ("clip", "break"):
        run.clip_grad_norm_(0.5)
    run.step(loss)


if kind == "epochs":
    total = ends = torch.zeros(())
    for epoch in run.epochs(TensorDataset(inputs)):
        for (batch,) in epoch:
            step(batch)
        total, ends = run.reduce(1.0, "sum"), flat()
    last = bool(torch.equal(ends, flat())) if not run.is_server else True
    print(f"rank {run.transport.rank}: {total:g} {last}", flush=True)
else:
    for number, (batch,) in enumerate(run.batches(TensorDataset(inputs))):
        if kind == "break" and run.worker == 1 and number == 2:
            break
        step(batch)
if run.summary:
    names = "samples", "gradients_computed", "gradients_applied"
    print(*(run.summary[name] for name in names), f"{flat().abs().max():.3g}", flush=True)
