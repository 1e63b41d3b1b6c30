"""Train a model of one or two dtypes and print its loss.

Arguments: the run's folder, the algorithm, and the dtypes.
"""

from __future__ import annotations

import sys

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

folder, algorithm, *names = sys.argv[1:]
dtypes: list[torch.dtype] = [getattr(torch, name) for name in names]
torch.manual_seed(1)
inputs = torch.randn(64, 3)


class Net(nn.Module):
    """Linear layers of the first dtype around a norm of the last."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(3, 8).to(dtypes[0])
        self.norm = nn.LayerNorm(8).to(dtypes[-1])
        self.last = nn.Linear(8, 1).to(dtypes[0])

    def forward(self, x: Tensor) -> Tensor:
        x = self.norm(self.first(x.to(dtypes[0])).to(dtypes[-1])).tanh()
        y: Tensor = self.last(x.to(dtypes[0]))
        return y.float()


model = Net()
run = DataParallel(
    model,
    algorithm=algorithm,
    samples=1600,
    batch_size=4,
    lr=0.02,
    run_dir=folder,
    quiet=True,
    wire="fp32" if torch.float64 in dtypes else "auto",
)
for (batch,) in run.batches(TensorDataset(inputs)):
    loss = (model(batch) - batch.sum(1, keepdim=True)).square().mean()
    loss.backward()
    run.step(loss)
final = (model(inputs) - inputs.sum(1, keepdim=True)).square().mean().item()
run.print(f"loss {final:.6f}")
