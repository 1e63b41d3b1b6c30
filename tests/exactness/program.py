"""Run rows of the table in sequence on every rank; started by ``jobs.py``.

    mpirun -np 3 python -m tests.exactness.program FOLDER

``FOLDER/job.json`` names the column and the rows. Every rank appends one line of JSON for each row
to ``FOLDER/rank-R.jsonl``: the final parameters and the samples of its batches, or the error that
ends the job.
"""

from __future__ import annotations

import gc
import json
import sys
import traceback
from collections import Counter
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from aladdin_mpi import DataParallel, island_mesh
from tests.exactness.row import COLUMNS, Batch, Column, Row
from tests.exactness.table import TABLE

SECONDS = 45.0
"""Timeout for other ranks in seconds."""


class Training:
    """One rank's run of a row.

    Args:
        row: a row of the table.
        column: the way to run it.
        folder: folder for the run's results.
    """

    def __init__(self, row: Row, column: Column, folder: Path) -> None:
        torch.manual_seed(0)
        self.row = row
        self.model = row.model()
        if column.is_sharded:
            shard(self.model)
        self.optimizer = row.optimizer(self.model)
        self.scheduler = None if row.scheduler is None else row.scheduler(self.optimizer)
        self.seen: list[tuple[int, list[int]]] = []
        settings = {"checkpoint_every": "never", **column.settings, **row.settings}
        if self.scheduler is not None:
            settings["scheduler"] = self.scheduler
        self.run = DataParallel(
            self.model,
            **row.arguments(self.model, self.optimizer),
            run_dir=folder / "run",
            overwrite=True,
            quiet=True,
            timeout=SECONDS,
            **settings,
        )

    @property
    def number(self) -> int:
        return len(self.seen)

    def batches(self, sharded: bool = False) -> Iterator[Batch]:
        for batch in self.run.batches(self.row.feed(self.row.samples()), sharded):
            self._note(0, batch)
            yield batch

    def epochs(self) -> Iterator[Iterator[Batch]]:
        for epoch in self.run.epochs(self.row.feed(self.row.samples())):
            yield self._noted(epoch)

    def _noted(self, epoch: Any) -> Iterator[Batch]:
        for batch in epoch:
            self._note(int(epoch), batch)
            yield batch

    def _note(self, epoch: int, batch: Batch) -> None:
        numbers = torch.as_tensor(self.row.numbers(batch)).flatten().tolist()
        self.seen.append((epoch, numbers))

    def loss(self, batch: Batch) -> Tensor:
        return self.row.loss(self.model, batch)


@cache
def mesh() -> DeviceMesh:
    """Return the mesh of this rank's island, which a process has only one of."""
    return island_mesh(2, algorithm="ar-sgd", device="cpu", timeout=SECONDS)


def shard(model: nn.Module) -> None:
    """Divide a model, and each of its layers without tied weights, among the island's ranks."""
    owners = Counter(p for part in model.modules() for p in part.parameters(recurse=False))
    for child in model.children():
        own = list(child.parameters())
        if own and all(owners[parameter] == 1 for parameter in own):
            fully_shard(child, mesh=mesh())
    fully_shard(model, mesh=mesh())


def whole(parameter: Tensor) -> Tensor:
    """Return the values of a parameter, of which each rank may have a part."""
    return parameter.full_tensor() if isinstance(parameter, DTensor) else parameter


def result(row: Row, column: Column, folder: Path) -> dict[str, Any]:
    """Train, and return the values that the test compares."""
    training = Training(row, column, folder)
    row.train(training)
    if not training.run.is_over:
        _ = training.run.summary  # the loop was left early
    return {
        "seen": training.seen,
        "is_server": training.run.is_server,
        "parameters": {
            name: whole(p.detach()).double().flatten().tolist()
            for name, p in training.model.named_parameters()
        },
    }


def main(folder: Path) -> None:
    job = json.loads((folder / "job.json").read_text())
    column = COLUMNS[job["column"]]
    report = None
    for name in job["rows"]:
        gc.collect()
        gc.freeze()
        try:
            outcome = result(TABLE[name], column, folder)
        except BaseException:
            outcome = {"error": traceback.format_exc()}
            raise
        finally:
            if report is None:
                report = (folder / f"rank-{_rank()}.jsonl").open("a")
            report.write(json.dumps({"row": name, **outcome}) + "\n")
            report.flush()


def _rank() -> int:
    from mpi4py import MPI

    return MPI.COMM_WORLD.rank


if __name__ == "__main__":
    main(Path(sys.argv[1]))
