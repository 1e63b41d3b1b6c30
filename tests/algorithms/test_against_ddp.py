"""The example's GPT with AdamW on two ranks: torch's DistributedDataParallel and ar-sgd."""

from __future__ import annotations

from pathlib import Path

import torch

from tests.launch import ROOT, needs, run_ranks
from tests.run.test_own_loop import HERE

SCRIPT = """
import importlib.util
import inspect
import sys

from mpi4py import MPI
import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler
from aladdin_mpi import DataParallel

which, source, store, out = sys.argv[1:]
spec = importlib.util.spec_from_file_location("char_gpt", source)
gpt = importlib.util.module_from_spec(spec)
spec.loader.exec_module(gpt)
text = inspect.getsource(inspect)[:16000]
letters = "".join(sorted(set(text)))
data = gpt.Text(text, letters, 32)
torch.manual_seed(0)
model = gpt.GPT(len(letters), 32, width=32)
optimizer = torch.optim.AdamW(gpt.groups(model), lr=3e-3, betas=(0.9, 0.95))
rank, ranks, batch = MPI.COMM_WORLD.rank, MPI.COMM_WORLD.size, 4
steps = len(data) // (ranks * batch)
scheduler = torch.optim.lr_scheduler.OneCycleLR(optimizer, 1e-2, total_steps=steps + 1)

if which == "ddp":
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks)
    net = DistributedDataParallel(model)
    sampler = DistributedSampler(data, shuffle=False, drop_last=True)
    for _, batch in zip(range(steps), DataLoader(data, batch, sampler=sampler,
                                                 collate_fn=gpt.collate)):
        optimizer.zero_grad()
        gpt.loss_of(net, batch).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
    dist.destroy_process_group()
else:
    run = DataParallel(
        model, algorithm="ar-sgd", optimizer=optimizer, scheduler=scheduler, clip=1.0,
        steps=steps, quiet=True, run_dir=store,
    )
    for batch in run.batches(DataLoader(data, batch, collate_fn=gpt.collate)):
        loss = gpt.loss_of(model, batch)
        loss.backward()
        run.step(loss)
if rank == 0:
    torch.save([gpt.validate(model, data), model.state_dict()], out)
"""


@needs("openmpi")
def test_ar_sgd_is_ddp_to_rounding(tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    source = str(ROOT / "examples" / "parallel" / "char_gpt.py")
    found = {}
    for which in ("ddp", "ours"):
        out = tmp_path / f"{which}.pt"
        words = ["script.py", which, source, str(tmp_path / f"{which}-store"), str(out)]
        run_ranks(2, words, env=HERE, cwd=tmp_path, timeout=120)
        found[which] = torch.load(out)
    (theirs, their_model), (ours, our_model) = found["ddp"], found["ours"]
    assert theirs < 3.4  # they have learnt: chance is 4.2
    assert abs(ours - theirs) < 1e-5 * theirs
    for name, values in their_model.items():
        mine = our_model[name]
        if name.endswith("qkv.bias"):
            # The keys' bias has no effect on attention, and so a gradient of rounding errors, of
            # which AdamW makes whole steps.
            values, mine = (torch.cat(v.chunk(3)[::2]) for v in (values, mine))
        torch.testing.assert_close(mine, values, rtol=1e-3, atol=1e-5)
