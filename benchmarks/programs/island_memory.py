"""Train a stack of layers as a rank of an island; print the memory of each worker as JSON.

The figure is the memory of all tensors after a step, in multiples of the model: without activations
and temporary memory of the passes.
"""

from __future__ import annotations

import argparse
import gc
import json

import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel, island_mesh
from aladdin_mpi.flat.shards import local

LAYERS, STEPS = 8, 6


def allocated() -> int:
    """Return the bytes of all tensors of this process, each memory once."""
    gc.collect()
    tensors = [local(each) for each in gc.get_objects() if isinstance(each, torch.Tensor)]
    memory = {each.untyped_storage().data_ptr(): each.untyped_storage() for each in tensors}
    return sum(storage.nbytes() for storage in memory.values())


def main() -> None:
    """Train and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--algorithm", required=True)
    add("--kind", choices=["single", "replicated", "sharded"], required=True)
    add("--servers", type=int, required=True)
    add("--width", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    island = 1 if args.kind == "single" else 2
    place = {"algorithm": args.algorithm, "servers": args.servers}
    model = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(LAYERS)])
    numel = sum(p.numel() for p in model.parameters())
    if args.kind == "sharded":
        mesh = island_mesh(island, **place)
        for module in (*model, model):
            fully_shard(module, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    run = DataParallel(
        model, optimizer=optimizer, steps=STEPS, batch_size=1, island=island, quiet=True, **place
    )
    seen = []
    for (batch,) in run.batches(TensorDataset(torch.ones(64, args.width))):
        loss = model(batch).square().mean()
        loss.backward()
        run.step(loss)
        seen.append(allocated())
    if not run.is_server:
        print(json.dumps({"models": max(seen) / (4 * numel)}), flush=True)


if __name__ == "__main__":
    main()
