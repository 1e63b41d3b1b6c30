"""Train the example's GPT with AdamW, using torch's DistributedDataParallel or ar-sgd.

Arguments: ``ddp`` or ``ours``, the example's file, a path that the ranks share, and the output file
for the loss and the model.
"""

from __future__ import annotations

import importlib.util
import inspect
import sys
from typing import Any

from mpi4py import MPI  # isort: skip
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

from aladdin_mpi import DataParallel

which, source, store, out = sys.argv[1:]
spec = importlib.util.spec_from_file_location("char_gpt", source)
assert spec is not None and spec.loader is not None
gpt: Any = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)
text = inspect.getsource(inspect)[:16000]
letters = "".join(sorted(set(text)))
data = gpt.Text(text, letters, 32)
torch.manual_seed(0)
model = gpt.GPT(len(letters), 32, width=32)
optimizer = torch.optim.AdamW(gpt.groups(model), lr=3e-3, betas=(0.9, 0.95))
rank, ranks, batch_size = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, 4
steps = len(data) // (ranks * batch_size)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1)

if which == "ddp":
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    net = DistributedDataParallel(model)
    sampler: Any = DistributedSampler(data, shuffle=False, drop_last=True)
    loader = DataLoader(data, batch_size, sampler=sampler, collate_fn=gpt.collate)
    for _, batch in zip(range(steps), loader, strict=False):
        optimizer.zero_grad()
        gpt.loss_of(net, batch).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()
else:
    run = DataParallel(
        model,
        algorithm="ar-sgd",
        optimizer=optimizer,
        scheduler=scheduler,
        clip=1.0,
        steps=steps,
        quiet=True,
        run_dir=store,
    )
    for batch in run.batches(DataLoader(data, batch_size, collate_fn=gpt.collate)):
        loss = gpt.loss_of(model, batch)
        loss.backward()
        run.step(loss)
if rank == 0:
    torch.save([gpt.validate(model, data), model.state_dict()], out)
