"""Run every algorithm twice, and print the number of replicas that each run leaves in memory."""

from __future__ import annotations

import gc

from torch import nn

from aladdin_mpi import DataParallel, load_dataset
from aladdin_mpi.flat.replica import Replica


def train(algorithm: str, number: int) -> int:
    model = nn.Linear(64, 10)
    flat = nn.Flatten()
    folder = f"{algorithm}-{number}"
    run = DataParallel(
        model, algorithm=algorithm, samples=64, batch_size=8, run_dir=folder, quiet=True
    )
    for images, labels in run.batches(load_dataset("digits").train):
        loss = nn.functional.cross_entropy(model(flat(images)), labels)
        loss.backward()
        run.step(loss)
    return run.transport.rank


for algorithm in "aladdin", "ar-sgd", "multistep":
    for number in 1, 2:
        rank = train(algorithm, number)
        gc.collect()
        replicas = [each for each in gc.get_objects() if type(each) is Replica]
        print(f"rank {rank} {algorithm} {number} left {len(replicas)}", flush=True)
