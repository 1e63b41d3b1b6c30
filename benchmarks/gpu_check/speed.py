"""Measure a training step with DDP, ar-sgd and aladdin-ahead, relative to plain torch.

Runs under mpirun with one rank, for contenders that need no other, or with two, of which rank 0 is
the server of aladdin-ahead; the argument is a folder for the runs. A contender and plain torch
train the same network on the same batch and GPU, in alternating turns of a few steps. The overhead
is the ratio of the medians of their turns, minus one.
"""

from __future__ import annotations

import gc
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from aladdin_mpi import DataParallel, accelerator
from aladdin_mpi.allreduce.torch_distributed import end_group
from benchmarks.gpu_check import rows
from benchmarks.gpu_check.device import is_test_device
from benchmarks.gpu_check.rows import SKIP, Row
from benchmarks.gpu_check.training import WORLD
from benchmarks.gpu_check.workloads import FULL, SMALL, Repeated, Workload, loss_of

PART = "speed"
LARGEST_OVERHEAD = 0.02
WARM_UP, TURNS, TURN = (2, 3, 2) if is_test_device() else (30, 9, 10)
"""Steps of each before the measurement, turns of each, and steps of a turn."""
STEPS = WARM_UP + TURNS * TURN + 1
"""Steps of a run, which ends in its last step."""
SERVER_THREADS = 8
"""As in batch scripts; the check's processes have one by default."""
REST = 0.5
"""Seconds before a turn, so that the messages of the last steps have arrived."""
Steps = Iterator[None]
"""Trains, and yields when the work of a step has been issued."""
Contender = Callable[[Workload, str], Steps]


def device() -> torch.device:
    """Return the GPU, or the CPU if the check runs without one."""
    kind = None if is_test_device() else accelerator.kind()
    return torch.device(kind, 0) if kind else torch.device("cpu")


def now() -> float:
    """Return the time when the device has completed all its work."""
    if device().type != "cpu":
        torch.accelerator.synchronize()
    return time.perf_counter()


def _train(module: nn.Module, optimizer: torch.optim.Optimizer, batch: tuple[Tensor, ...]) -> Steps:
    for _ in range(STEPS):
        optimizer.zero_grad()
        loss_of(module, *batch).backward()
        optimizer.step()
        yield


def plain(workload: Workload, folder: str) -> Steps:
    """Train with plain torch."""
    module, batch = workload.build(device())
    yield from _train(module, workload.torch_optimizer(module), batch)


def ddp(workload: Workload, folder: str) -> Steps:
    """Train with DistributedDataParallel and one process."""
    backend = "nccl" if device().type == "cuda" else "gloo"
    store: Any = dist.HashStore()  # type: ignore[attr-defined]  # a compiled class
    dist.init_process_group(backend, store=store, rank=0, world_size=1)
    try:
        module, batch = workload.build(device())
        net = DistributedDataParallel(module, gradient_as_bucket_view=True)
        yield from _train(net, workload.torch_optimizer(module), batch)
    finally:
        end_group()


def ours(algorithm: str) -> Contender:
    """Return a contender that trains with ``algorithm`` and its default options."""

    def train(workload: Workload, folder: str) -> Steps:
        module, batch = workload.build(device())
        run = DataParallel(
            module,
            algorithm=algorithm,
            device="gpu" if device().type != "cpu" else "cpu",
            steps=STEPS,
            batch_size=workload.samples,
            run_dir=Path(folder) / algorithm,
            overwrite=True,
            quiet=True,
            **workload.our_optimizer(module),
        )
        for inputs, labels in run.batches(Repeated(batch, STEPS)):
            loss = loss_of(module, inputs, labels)
            loss.backward()
            run.step(loss)
            yield

    return train


ALONE: dict[str, Contender] = {"ar-sgd": ours("ar-sgd"), "DDP": ddp}
WITH_SERVER: dict[str, Contender] = {"aladdin-ahead": ours("aladdin-ahead")}


def measure(contender: Contender, workload: Workload, folder: str) -> tuple[float, float]:
    """Return the median seconds of a step of plain torch and of the contender."""
    steps = contender(workload, folder)
    if WORLD.rank < WORLD.size - 1:  # the server
        torch.set_num_threads(min(SERVER_THREADS, len(os.sched_getaffinity(0))))
        for _ in steps:
            pass
        return 0.0, 0.0
    both = plain(workload, folder), steps
    for each in both:
        _seconds(each, WARM_UP)
    turns = [(_seconds(both[0], TURN), _seconds(both[1], TURN)) for _ in range(TURNS)]
    for each in both:
        for _ in each:
            pass
    plain_times, times = zip(*turns, strict=True)
    return statistics.median(plain_times), statistics.median(times)


def _seconds(steps: Steps, count: int) -> float:
    """Return the mean seconds of the next ``count`` steps."""
    time.sleep(REST)
    begin = now()
    for _ in range(count):
        next(steps)
    return (now() - begin) / count


def report(workload: Workload, name: str, plain_time: float, own_time: float) -> None:
    """Print the row of a contender; this package's must stay within the bound."""
    overhead = own_time / plain_time - 1
    rates = [f"{workload.samples / each:.4g}" for each in (own_time, plain_time)]
    figures = (
        f"{rates[0]} samples/s, plain torch {rates[1]}; a step {1e3 * own_time:.4g} and "
        f"{1e3 * plain_time:.4g} ms, {100 * overhead:+.1f} %"
    )
    title = f"{workload.name}: {name} with one worker"
    if is_test_device():
        rows.print_row(Row(PART, title, SKIP, figures, "needs a GPU; small networks on the CPU"))
    elif name == "DDP":
        rows.report(PART, title, True, figures, "for comparison")
    else:
        note = f"at most {100 * LARGEST_OVERHEAD:g} %"
        rows.report(PART, title, overhead <= LARGEST_OVERHEAD, figures, note)


def main() -> None:
    """Measure each workload with the contenders for this number of ranks."""
    for workload in SMALL if is_test_device() else FULL:
        for name, contender in (ALONE if WORLD.size == 1 else WITH_SERVER).items():
            found = WORLD.gather(measure(contender, workload, sys.argv[1]), root=0)
            if found is not None:
                report(workload, name, *found[-1])  # the last rank is the worker
            gc.collect()
            if device().type != "cpu":
                torch.accelerator.empty_cache()


if __name__ == "__main__":
    main()
