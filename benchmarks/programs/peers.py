"""Measure steps and sums of this project and of its peers, alternating on the same ranks.

The last line that rank 0 prints is a JSON list, with one record for every measurement: the time
of the slowest rank.
"""

from __future__ import annotations

import argparse
import itertools
import json
import sys
from collections.abc import Iterator
from typing import Any

from mpi4py import MPI

# isort: split
import torch

from aladdin_mpi.process import guard, heap
from benchmarks.programs import sums
from benchmarks.programs.contenders import LAST, LOOPS, Task, mean_step

WARM_UP = 4
"""Warm-up steps, in which libraries learn their buckets and PowerSGD begins."""


def slowest(seconds: float) -> float:
    """Return the value of the slowest rank."""
    return float(MPI.COMM_WORLD.allreduce(seconds, MPI.MAX))


def one_turn(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield every contender with every model and every size."""
    for model, who in itertools.product(args.model, args.loop):
        task = Task(model, args.batch, WARM_UP + args.steps + LAST, args.optimizer)
        seconds = slowest(mean_step(LOOPS[who](task), WARM_UP))
        yield {"what": "step", "size": model, "who": who, "seconds": seconds}
    for megabytes, who in itertools.product(args.megabytes, args.sum):
        seconds = slowest(sums.seconds(who, megabytes, args.bucket_mb, WARM_UP, args.sums))
        yield {"what": "sum", "size": f"{megabytes:g} MB", "who": who, "seconds": seconds}


def main() -> int:
    """Measure every case ``--repeats`` times."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--loop", nargs="*", choices=list(LOOPS), default=[])
    add("--model", nargs="*", default=[])
    add("--batch", type=int, default=8)
    add("--steps", type=int, default=10)
    add("--optimizer", default="sgd")
    add("--sum", nargs="*", choices=list(sums.SUMS), default=[])
    add("--megabytes", type=float, nargs="*", default=[])
    add("--bucket-mb", type=float, default=4.0)
    add("--sums", type=int, default=10)
    add("--repeats", type=int, default=1)
    args = parser.parse_args()
    torch.set_num_threads(1)
    heap.keep_freed()  # as in training, for all contenders
    records = []
    for turn in range(args.repeats):
        records += list(one_turn(args))
        if MPI.COMM_WORLD.rank == 0:
            print(f"turn {turn + 1} of {args.repeats}", file=sys.stderr, flush=True)
    if MPI.COMM_WORLD.rank == 0:
        print(json.dumps(records), flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(guard.run_guarded(main))
