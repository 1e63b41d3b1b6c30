"""Train a stack of layers with servers; print the peak memory of each server as JSON.

The figure is the growth of the resident memory of the process since before the model was made, in
multiples of the model.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel

LAYERS, STEPS = 8, 8


def resident(kind: str) -> int:
    """Return a figure of this process's memory in bytes, ``VmRSS`` or the peak ``VmHWM``."""
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(1024 * int(line.split()[1]) for line in lines if line.startswith(kind))


def main() -> None:
    """Train and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--algorithm", required=True)
    add("--servers", type=int, required=True)
    add("--width", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    nn.Linear(8, 8)(torch.ones(1, 8)).sum().backward()  # the libraries' own memory
    before = resident("VmRSS")
    model = nn.Sequential(*[nn.Linear(args.width, args.width) for _ in range(LAYERS)])
    numel = sum(p.numel() for p in model.parameters())
    rounds: dict[str, Any] = (
        {"async_diloco": {"steps": 2}} if args.algorithm == "async-diloco" else {}
    )
    run = DataParallel(
        model,
        algorithm=args.algorithm,
        servers=args.servers,
        steps=STEPS,
        batch_size=1,
        lr=1e-3,
        eval_every=0,
        checkpoint_every=None,
        quiet=True,
        **rounds,
    )
    for (batch,) in run.batches(TensorDataset(torch.ones(64, args.width))):
        model(batch).square().mean().backward()
        run.step()
    if run.is_server:
        print(json.dumps({"models": (resident("VmHWM") - before) / (4 * numel)}), flush=True)


if __name__ == "__main__":
    main()
