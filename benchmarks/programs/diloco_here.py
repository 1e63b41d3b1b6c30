"""Train the task of `benchmarks.torchft_diloco` with this project's DiLoCo.

Arguments: the plan as JSON, the folder of the records.
"""

from __future__ import annotations

import sys
from pathlib import Path

from aladdin_mpi import DataParallel
from benchmarks.programs import diloco_task as task


def main(plan: task.Plan, folder: Path) -> None:
    """Train on this rank, and write its record."""
    model = task.make_model(plan)
    run = DataParallel(
        model,
        optimizer=task.make_inner(model, plan),
        schedule=lambda samples: 1.0,
        algorithm="diloco",
        diloco={
            "steps": plan.steps,
            "fragments": plan.fragments,
            "overlap": plan.overlap,
            "blend": plan.blend,
            "outer_lr": task.OUTER_RATE,
            "outer_momentum": task.OUTER_MOMENTUM,
        },
        wire="fp32",
        batch_size=plan.batch,
        steps=plan.total,
        quiet=True,
    )
    rank, record = run.transport.rank, task.Record(plan)
    for batch in run.batches(task.batches(rank, plan), sharded=True):
        loss = task.loss_of(model, batch)
        loss.backward()
        run.step(loss)
        record.step_done()
    record.save(folder, rank, task.held_out_loss(model))


if __name__ == "__main__":
    main(task.Plan.from_json(sys.argv[1]), Path(sys.argv[2]))
