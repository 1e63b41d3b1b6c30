"""Measure a worker's step with ALADDIN and without communication, alternating on the same ranks.

Rank 0 is the server, the others are workers. The last line that rank 0 prints is a JSON list, with
one record for every measurement: the mean seconds of a step, on the slowest worker.
"""

from __future__ import annotations

import argparse
import itertools
import json
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from mpi4py import MPI

# isort: split
import torch
from torch.nn.functional import cross_entropy

from aladdin_mpi.flat.layout import Bucket, cut
from aladdin_mpi.flat.replica import Replica
from aladdin_mpi.optimizers.sgd import MomentumSGD
from aladdin_mpi.process import guard, heap
from aladdin_mpi.run.data_parallel import DataParallel
from aladdin_mpi.transport.mpi.engine import MpiTransport
from benchmarks.programs import contenders
from benchmarks.programs.contenders import (
    DECAY,
    LAST,
    LR,
    MOMENTUM,
    TIMEOUT,
    Moments,
    Task,
    mean_step,
)

WARM_UP = 3
"""Warm-up steps, which touch all memory once."""
SERVERS = 1
BUCKET_MB = 4.0


def flat(task: Task) -> Moments:
    """The arithmetic of ALADDIN's worker on its flat vectors, without anything else."""
    module, images, labels = task.build()
    replica = Replica(module)
    sgd = MomentumSGD(replica.parameters, MOMENTUM, DECAY)
    gradient = replica.new_vector()
    layout = cut(replica.numel, SERVERS, BUCKET_MB, shard_mb=BUCKET_MB)

    def on_bucket(bucket: Bucket) -> None:
        part = bucket.part
        sgd.descend(part, gradient[part], replica.parameters[part], LR)

    watch = replica.watch(layout)
    moments = []
    for _ in range(task.steps):
        replica.bind_gradients(gradient)
        watch.begin(on_bucket)
        cross_entropy(module(images), labels).backward()
        replica.end_backward()
        watch.end()
        moments.append(time.perf_counter())
    watch.close()
    return moments


def trained(task: Task, algorithm: str) -> Moments:
    """Train as usual, through the public interface."""
    return contenders.ours(task, algorithm=algorithm, servers=SERVERS)


def sleeping(task: Task, seconds: float) -> Moments:
    """Run timed computing without a transport: each step sleeps."""
    moments = []
    for _ in range(task.steps):
        time.sleep(seconds)
        moments.append(time.perf_counter())
    return moments


def aladdin_timed(task: Task, seconds: float) -> Moments:
    """Run ALADDIN with timed computing: the messages are real, a step is a sleep."""
    transport = MpiTransport(timeout=TIMEOUT)
    folder = Path(tempfile.mkdtemp(prefix="step-"))
    module, _, _ = task.build()
    workers = transport.size - SERVERS
    run = DataParallel(
        module,
        transport=transport,
        algorithm="aladdin",
        servers=SERVERS,
        compute="timed",
        compute_time=seconds,
        samples=task.steps * task.batch * workers,
        batch_size=task.batch,
        run_dir=folder / "run",
        quiet=True,
    )
    moments = []
    for _ in run.batches(task.steps * task.batch):
        run.step()
        moments.append(time.perf_counter())
    transport.close()
    shutil.rmtree(folder, ignore_errors=True)
    return moments


def measure(case: str, task: Task, compute_seconds: float) -> float:
    """Return the mean seconds of a step after the first ones, on the slowest worker."""
    loops: dict[str, Callable[[], Moments]] = {
        "alone": lambda: contenders.alone(task),
        "busy": lambda: contenders.alone(task),
        "flat": lambda: flat(task),
        "aladdin": lambda: trained(task, "aladdin"),
        "aladdin-ahead": lambda: trained(task, "aladdin-ahead"),
        "sleep": lambda: sleeping(task, compute_seconds),
        "aladdin timed": lambda: aladdin_timed(task, compute_seconds),
    }
    talks = case.startswith("aladdin")
    world = MPI.COMM_WORLD
    moments: Moments = []
    if talks or world.rank >= SERVERS:
        moments = loops[case]()
    mean = 0.0
    if world.rank >= SERVERS:
        mean = mean_step(moments, WARM_UP)
    _wait_for_all(busy=case == "busy")
    return float(world.allreduce(mean, MPI.MAX))


def _wait_for_all(busy: bool) -> None:
    """Wait at a barrier without using a core that others compute on; ``busy``: use one."""
    request = MPI.COMM_WORLD.Ibarrier()
    while not request.Test():
        if not busy:
            time.sleep(0.005)


def main() -> int:
    """Measure every case ``--repeats`` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", nargs="+", required=True)
    add("--case", nargs="+", required=True)
    add("--batch", type=int, required=True)
    add("--pixels", type=int, required=True)
    add("--steps", type=int, required=True)
    add("--compute-time", type=float, required=True)
    add("--repeats", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    heap.keep_freed()  # as in training, also for the cases without it
    records = []
    for _, model, case in itertools.product(range(args.repeats), args.model, args.case):
        steps = WARM_UP + args.steps + LAST
        task = Task(model, args.batch, steps, pixels=args.pixels)
        seconds = measure(case, task, args.compute_time)
        records.append({"model": model, "case": case, "seconds": seconds})
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
