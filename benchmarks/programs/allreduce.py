"""Measure the time that summing the gradient over all ranks adds to a step.

The last line that rank 0 prints is a JSON list, with one record for every measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable
from typing import Any

from mpi4py import MPI

# isort: split
import torch

from aladdin_mpi.allreduce import choose
from aladdin_mpi.allreduce.base import AllReduce
from aladdin_mpi.process import guard
from aladdin_mpi.transport.mpi.engine import MpiTransport

TIMEOUT = 60.0
BYTES_PER_MB = 1_000_000
WARM_UP = 3
"""Warm-up steps, in which memory is touched and Horovod learns the buckets."""
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
ROUND = 0.002
"""Seconds of one round of computing."""
Computing = Callable[[int], None]
"""Computes for a number of rounds."""


def _nothing(rounds: int) -> None:
    return None


def _sleep(rounds: int) -> None:
    """Compute as on a GPU: the host is idle."""
    if rounds:
        time.sleep(rounds * ROUND)


def _torch(rounds: int) -> None:
    """Compute as on a CPU: kernels of about 2 ms that release the interpreter lock."""
    matrix = torch.full((448, 448), 1e-3)
    for _ in range(rounds):
        matrix @ matrix


COMPUTINGS: dict[str, Computing] = {"none": _nothing, "sleep": _sleep, "torch": _torch}


class Step:
    """Run one step: compute, and start summing a bucket after each part of the computation."""

    def __init__(self, megabytes: float, bucket_mb: float, computing: str, rounds: int) -> None:
        self._buckets = torch.ones(int(megabytes * BYTES_PER_MB / 4)).split(
            int(bucket_mb * BYTES_PER_MB / 4)
        )
        self._compute = COMPUTINGS[computing]
        self._rounds = rounds

    def run(self, reducer: AllReduce | None) -> float:
        """Return the seconds of the step; without ``reducer``, of its computing alone."""
        start = time.perf_counter()
        pending = []
        count = len(self._buckets)
        for key, bucket in enumerate(self._buckets):
            self._compute(self._rounds * (key + 1) // count - self._rounds * key // count)
            if reducer is not None:
                pending.append(reducer.start(bucket, key))
        for one in pending:
            one.wait()
        for bucket in self._buckets:
            bucket.fill_(1.0)  # repeated sums would soon be infinite
        return time.perf_counter() - start


def measure(transport: MpiTransport, step: Step, reducer: AllReduce | None, steps: int) -> float:
    """Return the mean seconds of a step on the slowest rank."""
    transport.wait(transport.ibarrier())
    seconds = sum(step.run(reducer) for _ in range(steps)) / steps
    return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))


def backend_records(transport: MpiTransport, args: argparse.Namespace) -> list[dict[str, Any]]:
    """Yield every combination of backend (or none), size and kind of computation."""
    records = []
    for backend in ("none", *args.backend):
        name, _, dtype = backend.partition("-")
        reducer = None
        if backend != "none":
            reducer = choose.make(name, transport, torch.device("cpu"), DTYPES[dtype or "fp32"])
        for megabytes, computing in itertools.product(args.megabytes, COMPUTINGS):
            step = Step(megabytes, args.bucket_mb, computing, args.rounds)
            measure(transport, step, reducer, WARM_UP)
            seconds = measure(transport, step, reducer, args.steps)
            case = {"backend": backend, "megabytes": megabytes, "computing": computing}
            records.append({**case, "seconds": seconds})
        if reducer is not None:
            reducer.close()
    return records


def main() -> int:
    """Measure every case ``--repeats`` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--backend", nargs="+", required=True)
    parser.add_argument("--megabytes", type=float, nargs="+", required=True)
    parser.add_argument("--bucket-mb", type=float, required=True)
    parser.add_argument("--rounds", type=int, required=True)
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    transport = MpiTransport(timeout=TIMEOUT)
    records = [r for _ in range(args.repeats) for r in backend_records(transport, args)]
    transport.close()
    if transport.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
