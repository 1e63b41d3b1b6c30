"""Train the task of `benchmarks.torchft_diloco` with torchft's DiLoCo, over gloo.

Arguments: the plan as JSON, the folder of the records, the rank, the number of workers, this host's
address, the lighthouse's address. A worker is a replica group of one process.
"""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path

import torch
from torch.distributed import (  # type: ignore[attr-defined]  # compiled, without type hints
    AllreduceOptions,
    TCPStore,
)
from torchft.local_sgd import DiLoCo
from torchft.manager import Manager
from torchft.process_group import ProcessGroupGloo

from benchmarks.programs import diloco_task as task

TIMEOUT = timedelta(seconds=60)


def main(
    plan: task.Plan, folder: Path, rank: int, workers: int, address: str, lighthouse: str
) -> None:
    """Train on this rank, and write its record.

    Raises:
        RuntimeError: an outer step was not committed.
    """
    torch.set_num_threads(1)
    model = task.make_model(plan)
    inner = task.make_inner(model, plan)
    fragments = task.fragments_of(model, plan)
    outer = [
        torch.optim.SGD(
            fragment.parameters(), lr=task.OUTER_RATE, momentum=task.OUTER_MOMENTUM, nesterov=True
        )
        for fragment in fragments
    ]
    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    group = ProcessGroupGloo(timeout=TIMEOUT)
    manager = Manager(
        pg=group,
        min_replica_size=workers,
        load_state_dict=model.load_state_dict,
        state_dict=model.state_dict,
        use_async_quorum=False,  # required by DiLoCo
        init_sync=False,  # all models are the same
        timeout=TIMEOUT,
        quorum_timeout=TIMEOUT,
        rank=0,
        world_size=1,
        replica_id=f"worker{rank}",
        store_addr=address,
        store_port=store.port,
        hostname=address,
        lighthouse_addr=lighthouse,
        max_retries=0,
    )
    record = task.Record(plan)
    with DiLoCo(
        manager,
        fragments,
        inner,
        outer,
        sync_every=plan.steps,
        fragment_sync_delay=plan.overlap,
        fragment_update_alpha=plan.blend,
    ):
        for batch in task.batches(rank, plan):
            inner.zero_grad()
            task.loss_of(model, batch).backward()
            inner.step()
            record.step_done()
    if manager.current_step() != plan.total // plan.steps * plan.fragments:
        raise RuntimeError(f"torchft committed only {manager.current_step()} outer steps")
    for values in model.parameters():  # at its end, the project averages the models too
        group.allreduce([values.data], AllreduceOptions()).wait()
        values.data /= workers
    record.save(folder, rank, task.held_out_loss(model))
    manager.shutdown(wait=False)


if __name__ == "__main__":
    text, folder, rank, workers, address, lighthouse = sys.argv[1:]
    main(task.Plan.from_json(text), Path(folder), int(rank), int(workers), address, lighthouse)
