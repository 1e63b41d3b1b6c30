"""The mesh of an island, for models that FSDP divides among its ranks."""

from __future__ import annotations

import atexit
from collections.abc import Sequence
from typing import Literal

import torch
from torch.distributed import fsdp
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from aladdin_mpi.accelerator import identity, is_accelerator
from aladdin_mpi.allreduce.torch_distributed import Meeting, end_group, obstacle
from aladdin_mpi.errors import RefusedError, UserError, combined
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.process.guard import no_exit
from aladdin_mpi.run.job import TIMEOUT, Job, everyones, find_job
from aladdin_mpi.run.script import simulated_rank
from aladdin_mpi.session.islands import check_servers_of_parts, equal_groups

DEFAULTS = {name: RunOptions.model_fields[name].default for name in ("algorithm", "servers")}


def island_mesh(
    island: int | Literal["node"] = "node",
    *,
    algorithm: str = DEFAULTS["algorithm"],
    servers: int = DEFAULTS["servers"],
    device: str = "auto",
    timeout: float = TIMEOUT,
) -> DeviceMesh:
    """Return the device mesh of this rank's island, to divide a model among its ranks.

    Every rank calls it before the model is wrapped, with the arguments that ``DataParallel`` gets
    afterwards::

        settings = {"algorithm": "ar-sgd", "island": 4}
        mesh = aladdin_mpi.island_mesh(**settings)
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        fully_shard(model, mesh=mesh)
        run = DataParallel(model, **settings, ...)

    It starts torch.distributed with a default group of the island's ranks only: NCCL between GPUs,
    gloo otherwise. A failure in another island does not affect it. Servers form groups of the same
    size, so that each has the part of the model that it serves.

    Args:
        island: number of workers of an island, which are on one host; "node": all of a host.
        algorithm: of the run, which determines whether it has servers.
        servers: number of servers, a multiple of the island's size.
        device: of the run's workers.
        timeout: longest wait for another rank in seconds; 0: no limit.

    Raises:
        UserError: the ranks do not form equal islands, torch.distributed cannot be used or is in
            use already, or ranks cannot connect.
    """
    job = find_job({"algorithm": algorithm, "servers": servers, "timeout": timeout})
    simulated = simulated_rank()
    if simulated is not None and simulated.is_for_mpi:
        raise UserError(
            "island_mesh() requires a process for each rank, but aladdin_mpi.compare runs the "
            "script once in one process. Train it with each algorithm, and pass the run folders to "
            "aladdin_mpi.compare --read."
        )
    if job.shares_process:
        raise UserError(
            "island_mesh() requires a process for each rank, which a simulation has not. Simulate "
            "the model without fully_shard: a replicated island makes the same steps."
        )
    problem, where = "", torch.device("cpu")
    group: Sequence[int] = [job.rank]
    try:
        with no_exit():
            where = job.device(device)
            group = _group(job, island)
            if not hasattr(fsdp, "fully_shard"):
                raise UserError(
                    f"island_mesh() requires FSDP2, which torch {torch.__version__} does not have "
                    "in torch.distributed.fsdp. Install torch 2.6 or later."
                )
            if reason := obstacle(where):
                raise UserError(f"island_mesh(): {reason}")
    except UserError as error:
        problem = str(error)
    _agree(job, problem)
    own = identity(where) if is_accelerator(where) else "cpu"
    _agree(job, _shared(job.rank, group, everyones(own), where))
    Meeting(job.rank, group, job.hosts, everyones, "island_mesh()").join(where, timeout or None)
    atexit.register(end_group)
    return init_device_mesh(where.type, (len(group),), mesh_dim_names=("island",))


def _group(job: Job, island: int | Literal["node"]) -> Sequence[int]:
    """Return the ranks of this rank's island, or of its group of servers."""
    if len(job.hosts) == 1:
        return [0]
    islands = equal_groups(job.hosts, job.servers, island, "--island")
    size = len(islands[0])
    check_servers_of_parts(job.servers, size)
    servers = [range(start, start + size) for start in range(0, job.servers, size)]
    return next(group for group in [*servers, *islands] if job.rank in group)


def _shared(
    rank: int, group: Sequence[int], identities: Sequence[str], device: torch.device
) -> str:
    """Return a description of ranks of a group that share a GPU, which NCCL refuses; "" if none.

    Every rank may call its GPU ``cuda:0``, so ``identities`` distinguish them.
    """
    mine = [each for each in group if identities[each] == identities[rank]]
    if identities[rank] == "cpu" or len(mine) == 1 or rank != mine[0]:
        return ""
    return (
        f"island_mesh(): ranks {', '.join(map(str, mine))} of an island share {device}, and "
        "FSDP's library for GPUs, NCCL, requires one each. Start at most as many workers on a host "
        'as it has GPUs, or pass device="cpu".'
    )


def _agree(job: Job, problem: str) -> None:
    """End the program on every rank if one has a problem; "" is none."""
    problems = [each or None for each in everyones(problem)]
    if message := combined(problems, len(problems)):
        raise UserError(message, agreed=True) if job.rank == 0 else RefusedError
