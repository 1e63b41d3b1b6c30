"""Train the cases of ``optimizer_cases.py`` named by the arguments, and save their inputs."""

from __future__ import annotations

import os
import sys

import torch
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from tests.run.optimizer_cases import CASES, NUMBERS, loss_of, network, one_cycle

rank = int(os.environ["OMPI_COMM_WORLD_RANK"])
for name in sys.argv[1:]:
    case = CASES[name]
    model = network()
    optimizer = case.make(model, rank)
    scheduler = one_cycle(optimizer)
    run = DataParallel(
        model,
        optimizer=optimizer,
        scheduler=scheduler,
        algorithm=case.algorithm,
        batch_size=4,
        bucket_mb=0.0002,
        seed=3,
        quiet=True,
        log_every=8,
        **{"samples": 168, "run_dir": name, **case.settings},
    )
    mine = []
    for (numbers,) in run.batches(TensorDataset(NUMBERS)):
        mine.append(numbers.clone())
        loss = loss_of(model, numbers)
        loss.backward()
        case.body(run, scheduler, len(mine))
        run.step(loss)
    torch.save({"batches": mine, "model": model.state_dict()}, f"{name}-{rank}.pt")
