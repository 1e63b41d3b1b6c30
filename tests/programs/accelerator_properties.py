"""Print an accelerator's properties before ``prepare``, then train one epoch.

Argument: ``real`` for Hugging Face's accelerate, or an algorithm.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

accelerator: Any
if sys.argv[1] == "real":
    import accelerate  # type: ignore[import-untyped]

    accelerator = accelerate.Accelerator(cpu=True, mixed_precision=None)
else:
    from aladdin_mpi import Accelerator

    accelerator = Accelerator(mixed_precision=None, algorithm=sys.argv[1], epochs=1, quiet=True)


def place() -> list[Any]:
    return [
        accelerator.is_main_process,
        accelerator.is_local_main_process,
        accelerator.device,
        accelerator.num_processes,
    ]


before = place()
accelerator.print("once", "before", sep=" ", flush=True)
samples: Any = [torch.ones(4) for _ in range(8)]
model = torch.nn.Linear(4, 1).to(accelerator.device)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
model, optimizer, loader = accelerator.prepare(model, optimizer, DataLoader(samples, 2))
assert place() == before
for batch in loader:
    accelerator.backward(model(batch).mean())
    optimizer.step()
    optimizer.zero_grad()
accelerator.print("once after")
print("place", *before, flush=True)
