"""Close runs within their loops, and compare the model with plain PyTorch's."""

from __future__ import annotations

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from aladdin_mpi import DataParallel

torch.manual_seed(0)
inputs = torch.randn(64, 8)
loader = DataLoader(TensorDataset(inputs, inputs.sum(1, keepdim=True)), 8)


def pair() -> tuple[nn.Linear, torch.optim.Optimizer]:
    torch.manual_seed(1)
    model = nn.Linear(8, 1)
    return model, torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9)


plain, optimizer = pair()
for number, (batch, targets) in enumerate(loader):
    if number == 3:
        break
    optimizer.zero_grad()
    nn.functional.mse_loss(plain(batch), targets).backward()
    optimizer.step()

model, optimizer = pair()
run = DataParallel(model, optimizer=optimizer, epochs=2, run_dir="run", quiet=True)
for epoch in run.epochs(loader):
    for number, (batch, targets) in enumerate(epoch):
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        if number == 3:
            run.close()
            break
        run.step(loss)
    break
assert torch.equal(plain.weight, model.weight)

with DataParallel(model, epochs=2, run_dir="left", quiet=True) as run:
    batches = run.batches(loader)
    for batch, targets in batches:
        loss = nn.functional.mse_loss(model(batch), targets)
        loss.backward()
        run.step(loss)
        break
print(run.is_over, run.summary["samples"] < 2 * 64)
run.close()
run.close()
with DataParallel(model, epochs=1, run_dir="never begun", quiet=True) as run:
    pass
run = DataParallel(model, epochs=1, run_dir="never begun", quiet=True)
run.close()
