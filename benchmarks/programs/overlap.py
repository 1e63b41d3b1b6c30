"""Measure how long a rank waits for a message after computing: rank 0 sends to rank 1.

The last line that rank 0 prints is a JSON list, with one record for every measurement.
"""

from __future__ import annotations

import argparse
import itertools
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from aladdin_mpi.process import guard
from aladdin_mpi.transport.base import Request
from aladdin_mpi.transport.mpi.engine import MpiTransport  # before MPI, whose start it configures

# isort: split
import torch
from mpi4py import MPI
from torch import Tensor
from torch.nn.functional import conv2d

TAG = 1
TIMEOUT = 60.0
BYTES_PER_MB = 1_000_000
Computing = Callable[[float], int]
"""Computes for a number of seconds and returns the number of rounds."""


@dataclass(frozen=True)
class Case:
    """A measured case.

    ``computing`` is one of ``COMPUTINGS``; ``both``: the receiver computes too; ``message_mb``:
    largest message, 0: none is sent; ``progress``: with the progress thread.
    """

    computing: str
    both: bool
    message_mb: float
    progress: bool


@dataclass(frozen=True)
class Times:
    """One rank's measurement: seconds computed, seconds waited afterwards, rounds computed."""

    computed: float
    waited: float
    rounds: int


def _nothing(seconds: float) -> int:
    return 0


def _sleep(seconds: float) -> int:
    time.sleep(seconds)
    return 0


def _torch(seconds: float) -> int:
    """Compute as on a CPU: kernels of a few ms that release the interpreter lock."""
    matrix = torch.full((384, 384), 1e-3)
    images, kernel = torch.ones(8, 32, 32, 32), torch.full((32, 32, 3, 3), 1e-3)
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        matrix @ matrix
        conv2d(images, kernel, padding=1)
        rounds += 1
    return rounds


def _python(seconds: float) -> int:
    """Compute in a progress thread's worst case: hold the interpreter lock until requested."""
    end, rounds = time.perf_counter() + seconds, 0
    while time.perf_counter() < end:
        sum(i * i for i in range(1000))
        rounds += 1
    return rounds


COMPUTINGS: dict[str, Computing] = {
    "none": _nothing,
    "sleep": _sleep,
    "torch": _torch,
    "python": _python,
}


def cases(message_mbs: list[float]) -> Iterator[Case]:
    """Return every case; those to be compared follow each other."""
    for both, computing in itertools.product((False, True), ("sleep", "torch", "python")):
        yield Case(computing, both, 0.0, progress=False)
        for message_mb, progress in itertools.product(message_mbs, (True, False)):
            yield Case("none", both, message_mb, progress)
            yield Case(computing, both, message_mb, progress)


def measure(case: Case, payload: Tensor, seconds: float) -> Times:
    """Run one transfer of ``payload`` during ``seconds`` of computing."""
    # A new transport for each: the thread of another one would move these messages too.
    transport = MpiTransport(timeout=TIMEOUT, progress=case.progress)
    sender = transport.rank == 0
    pieces = payload.split(int(case.message_mb * BYTES_PER_MB)) if case.message_mb else ()
    compute = COMPUTINGS[case.computing if sender or case.both else "none"]
    requests: list[Request] = []
    if not sender:
        requests = [transport.irecv(piece, 0, TAG) for piece in pieces]
    transport.wait(transport.ibarrier())
    start = time.perf_counter()
    if sender:
        requests = [transport.isend(piece, 1, TAG) for piece in pieces]
    rounds = compute(seconds)
    computed = time.perf_counter()
    transport.wait(*requests)
    waited = time.perf_counter() - computed
    transport.close()
    return Times(computed - start, waited, rounds)


def main() -> int:
    """Measure every case ``--repeats`` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--megabytes", type=float, required=True)
    parser.add_argument("--message-mb", type=float, nargs="+", required=True)
    parser.add_argument("--seconds", type=float, required=True)
    parser.add_argument("--repeats", type=int, required=True)
    args = parser.parse_args()
    torch.set_num_threads(1)
    payload = torch.ones(int(args.megabytes * BYTES_PER_MB), dtype=torch.uint8)
    measure(Case("none", False, args.megabytes, True), payload, 0.0)  # connects the ranks
    world, records = MPI.COMM_WORLD, list[dict[str, Any]]()
    for _, case in itertools.product(range(args.repeats), list(cases(args.message_mb))):
        ranks = world.gather(asdict(measure(case, payload, args.seconds)))
        records.append({**asdict(case), "ranks": ranks})
    if world.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
