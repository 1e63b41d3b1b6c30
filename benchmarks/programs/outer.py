"""Train one of the tasks of `benchmarks.outer`, which simulates this program.

Arguments: the task, the run folder, the seed, the steps of a worker, the workers, the peak rate,
the number of evaluations, and optionally the folder of CIFAR-10.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import torch

from aladdin_mpi import DataParallel
from aladdin_mpi.transport.virtual import endpoint
from benchmarks.outer_cells import RECEIVED_FILE
from benchmarks.programs.outer_tasks import RECEIVED, schedule, task

endpoint.EAGER = 256
"""Bytes up to which a send is done at once: requests and reports, but no part of a model.

By default it is 64 KB, more than any message of these small models.
"""


def main(
    name: str,
    run_dir: str,
    seed: int,
    steps: int,
    workers: int,
    peak: float,
    points: int,
    folder: Path | None,
) -> None:
    """Train; losses are in the metrics, and received bytes in a file of the run folder."""
    chosen = task(name, folder)
    total = steps * workers * chosen.settings["batch_size"]
    torch.manual_seed(seed)
    model = chosen.model()
    rates: dict[str, Any] = {} if chosen.optimizer else {"lr": peak, "lr_scaling": "none"}
    run = DataParallel(
        model,
        optimizer=None if chosen.optimizer is None else chosen.optimizer(model, peak),
        schedule=schedule(total),
        samples=total,
        seed=seed,
        run_dir=run_dir,
        quiet=True,
        evaluate=chosen.evaluate,
        eval_every=total / points / len(chosen.data),
        log_every=total // points,
        **rates,
        **chosen.settings,
    )
    before = None  # the first model, which is received in advance
    for batch in run.batches(chosen.data):
        traffic = run.transport.traffic
        before = traffic.bytes_received if before is None else before
        loss = chosen.loss(model, batch)
        loss.backward()
        run.step(loss)
        RECEIVED[run.transport.rank] = traffic.bytes_received - before
    if run.transport.rank == 0:
        (Path(run_dir) / RECEIVED_FILE).write_text(json.dumps(sum(RECEIVED.values())))


if __name__ == "__main__":
    name, to, seed, steps, workers, peak, points, *data = sys.argv[1:]
    folder = Path(data[0]) if data else None
    main(name, to, int(seed), int(steps), int(workers), float(peak), int(points), folder)
