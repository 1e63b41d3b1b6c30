"""Time of a training step with plain torch, DistributedDataParallel, ar-sgd and aladdin-ahead.

Runs under mpirun with one rank, for what needs no other, or with two, of which rank 0 is the server
of aladdin-ahead; the argument is a folder for the runs. Each contender trains the same network on
the same batch with one GPU. They take turns, and the medians are compared: the overhead is the time
of a step over plain torch's, minus one.
"""

from __future__ import annotations

import gc
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from mpi4py import MPI

# isort: split
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from aladdin_mpi import DataParallel, accelerator
from aladdin_mpi.allreduce.over_torch import end_group
from aladdin_mpi.model import fused
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.rows import SKIP, Row
from benchmarks.gpu_check.training import WORLD
from benchmarks.gpu_check.workloads import FULL, SMALL, Repeated, Workload, loss_of

PART = "speed"
LARGEST_OVERHEAD = 0.02
FEWEST_ROUNDS, MOST_ROUNDS, ROUND_SECONDS = 3, 7, 20.0
"""Turns of each contender: at least and at most, and the time after which no more begin."""
WARM_UP, MEASURED = (2, 3) if is_test_device() else (6, 20)
"""Steps of a turn before the measurement, and within it."""
PLAIN = "plain torch"
UNFUSED = "aladdin-ahead without fused kernels"
Contender = Callable[[Workload, str], float]


def device() -> torch.device:
    """Return the GPU; the CPU where the check runs without one."""
    kind = None if is_test_device() else accelerator.kind()
    return torch.device(kind, 0) if kind else torch.device("cpu")


class _Stopwatch:
    """Measures the mean time of a step; waits for the device at both ends only."""

    def __init__(self) -> None:
        self._steps = 0
        self._begin = 0.0
        self.mean = 0.0

    def step(self) -> None:
        """Count a step whose work has been given out."""
        self._steps += 1
        if self._steps == WARM_UP:
            self._begin = self._now()
        elif self._steps == WARM_UP + MEASURED:
            self.mean = (self._now() - self._begin) / MEASURED

    @staticmethod
    def _now() -> float:
        if device().type != "cpu":
            torch.accelerator.synchronize()
        return time.perf_counter()


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> float:
    watch = _Stopwatch()
    for _ in range(WARM_UP + MEASURED):
        optimizer.zero_grad()
        loss_of(module, *batch).backward()
        optimizer.step()
        watch.step()
    return watch.mean


def plain(workload: Workload, folder: str) -> float:
    """Return the seconds of a step of plain torch."""
    module, batch = workload.build(device())
    return _train(module, workload.torch_optimizer(module), batch)


def ddp(workload: Workload, folder: str) -> float:
    """Return the seconds of a step of DistributedDataParallel with one process."""
    backend = "nccl" if device().type == "cuda" else "gloo"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # a compiled class
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        module, batch = workload.build(device())
        net = DistributedDataParallel(module, gradient_as_bucket_view=True)
        return _train(net, workload.torch_optimizer(module), batch)
    finally:
        end_group()


def ours(algorithm: str, is_fused: bool = True) -> Contender:
    """Return a contender that trains with ``algorithm`` and its default options.

    Args:
        algorithm: its name.
        is_fused: use the package's own kernels where they can be compiled.
    """

    def train(workload: Workload, folder: str) -> float:
        fused.enabled = is_fused
        module, batch = workload.build(device())
        steps = WARM_UP + MEASURED + 1  # the last step also ends the run
        run = DataParallel(
            module,
            algorithm=algorithm,
            device="gpu" if device().type != "cpu" else "cpu",
            steps=steps,
            batch_size=workload.samples,
            run_dir=Path(folder) / algorithm,
            overwrite=True,
            quiet=True,
            **workload.our_optimizer(module),
        )
        watch = _Stopwatch()
        for inputs, labels in run.batches(Repeated(batch, steps)):
            loss = loss_of(module, inputs, labels)
            loss.backward()
            run.step(loss)
            watch.step()
        return watch.mean

    return train


ALONE: dict[str, Contender] = {PLAIN: plain, "DDP, one process": ddp, "ar-sgd": ours("ar-sgd")}
WITH_SERVER: dict[str, Contender] = {
    PLAIN: plain,
    UNFUSED: ours("aladdin-ahead", is_fused=False),
    "aladdin-ahead": ours("aladdin-ahead"),
}


def measure(contenders: dict[str, Contender], workload: Workload, folder: str) -> dict[str, float]:
    """Return the median seconds of a step by contender, over several turns of each."""
    found: dict[str, list[float]] = {name: [] for name in contenders}
    begin = time.monotonic()
    for number in range(MOST_ROUNDS):
        is_over = number >= FEWEST_ROUNDS and time.monotonic() - begin > ROUND_SECONDS
        if WORLD.bcast(is_over):
            break
        for name, contender in contenders.items():
            if contender not in (plain, ddp) or WORLD.rank == WORLD.size - 1:
                found[name].append(contender(workload, folder))
                moment = f"{time.monotonic() - begin:.1f} s"
                print(
                    f"{moment}: {workload.name}, {name}, rank {WORLD.rank}: {found[name][-1]:.4g}"
                )
            _wait_for_all()
            gc.collect()
            if device().type != "cpu":
                torch.accelerator.empty_cache()
    return {name: statistics.median(times) if times else 0.0 for name, times in found.items()}


def _wait_for_all() -> None:
    """Wait at a barrier without occupying a core."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        time.sleep(0.005)


def report(workload: Workload, seconds: dict[str, float]) -> None:
    """Print a row for each contender; those of this package have to stay within the bound."""
    for name, each in seconds.items():
        overhead = each / seconds[PLAIN] - 1
        figures = f"{workload.samples / each:.4g} samples/s, {1e3 * each:.4g} ms a step"
        if name != PLAIN:
            figures += f", {100 * overhead:+.1f} % against plain torch"
        title = f"{workload.name}: {name}, {WORLD.size} rank{'s' * (WORLD.size > 1)}"
        if is_test_device():
            rows.print_row(
                Row(PART, title, SKIP, figures, "needs a GPU; small networks on the CPU")
            )
            continue
        is_bounded = name in ("ar-sgd", "aladdin-ahead")
        passed = not is_bounded or overhead <= LARGEST_OVERHEAD
        note = f"at most {100 * LARGEST_OVERHEAD:g} %" if is_bounded else "for comparison"
        rows.report(PART, title, passed, figures, note)


def main() -> None:
    """Measure each workload with the contenders that this number of ranks serves."""
    contenders = dict(ALONE if WORLD.size == 1 else WITH_SERVER)
    for workload in SMALL if is_test_device() else FULL:
        if workload.optimizer != "sgd":
            contenders.pop(UNFUSED, None)  # the kernels are those of the built-in SGD
        found = WORLD.gather(measure(contenders, workload, sys.argv[1]), root=0)
        if found is not None:
            report(workload, found[-1])  # the last rank is the worker


if __name__ == "__main__":
    main()
