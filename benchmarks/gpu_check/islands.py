"""Islands: a replicated model, and one that FSDP divides among the ranks of an island.

Runs under mpirun with four ranks; the argument is a folder for the runs. Replicated islands
exchange values over MPI, so their ranks can share a GPU. FSDP requires NCCL, which requires a GPU
for each rank of an island: with a single GPU each rank is an island by itself, and all use FSDP.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

from aladdin_mpi import island_mesh
from aladdin_mpi.allreduce.torch_distributed import end_group
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.equality import check_accounting, check_deterministic, largest
from benchmarks.gpu_check.rows import SKIP, Row
from benchmarks.gpu_check.training import WORLD, losses, make, network, parameters

PART = "equality"
TOLERANCE = 1e-3
HALF_TOLERANCE = 0.2
"""Largest difference from the CPU, relative to the largest change in training; with bf16."""


def train_divided(folder: str, device: str, island: int, how: dict[str, Any]) -> torch.Tensor:
    """Return the parameters after training a model that FSDP has divided."""
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(**how)
    module = network()
    mesh = island_mesh(island, algorithm="ar-sgd", device=device)
    for layer in module:
        if list(layer.parameters()):
            fully_shard(layer, mesh=mesh, mp_policy=policy)
    fully_shard(module, mesh=mesh, mp_policy=policy)
    run = make(module, folder, device, "ar-sgd divided", island=island)
    for _ in losses(run, module):
        pass
    whole: list[Any] = list(module.parameters())  # DTensors
    vector = torch.cat([p.full_tensor().detach().cpu().reshape(-1) for p in whole])
    end_group()
    return vector


def check_divided(folder: str, device: str) -> None:
    """Compare FSDP on the accelerator with FSDP on the CPU, in fp32 and bf16."""
    count = torch.cuda.device_count() if device == "gpu" else 2
    island = 2 if count > 1 else 1
    start = parameters(network())
    for name, how, bound in (
        ("fp32", {}, TOLERANCE),
        ("bf16", {"param_dtype": torch.bfloat16, "reduce_dtype": torch.float32}, HALF_TOLERANCE),
    ):
        expected = train_divided(folder, "cpu", island, how)
        result = train_divided(folder, device, island, how)
        error = largest(result - expected) / largest(expected - start)
        if WORLD.rank == 0:
            title = f"ar-sgd, FSDP in islands of {island}, {name}, {WORLD.size} ranks"
            figures = f"difference from the CPU {error:.1e} of the change"
            rows.report(PART, title, error <= bound, figures, f"at most {bound:g}")


def main() -> None:
    """Check islands of two."""
    folder = sys.argv[1]
    check_deterministic(folder, "ar-sgd islands of 2", {"island": 2})
    check_accounting(folder, "aladdin-ahead islands of 2", {"island": 2, "servers": 2})
    if not is_test_device():
        check_divided(folder, "gpu")
    elif WORLD.rank == 0:
        rows.print_row(Row(PART, "ar-sgd, FSDP", SKIP, note="needs a GPU"))


if __name__ == "__main__":
    main()
