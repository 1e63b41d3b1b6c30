"""Run a plain training loop that keeps freed memory, or leaves it to the C library.

Prints, as JSON, the median seconds of a step and the mean page faults in it.
"""

from __future__ import annotations

import argparse
import json
import resource
from itertools import pairwise
from statistics import median

import torch

from aladdin_mpi.process import heap
from benchmarks.programs.contenders import Task, alone

WARM_UP = 3


def faults() -> int:
    """Return the number of pages supplied to this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Train and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    add = parser.add_argument
    add("--model", required=True)
    add("--batch", type=int, required=True)
    add("--steps", type=int, required=True)
    add("--keep", action="store_true")
    args = parser.parse_args()
    torch.set_num_threads(1)
    kept = args.keep and heap.keep_freed()
    seen: list[int] = []
    task = Task(args.model, args.batch, WARM_UP + args.steps)
    moments = alone(task, lambda: seen.append(faults()))
    steps = [later - earlier for earlier, later in pairwise(moments)]
    found = {
        "kept": kept,
        "seconds": median(steps[WARM_UP - 1 :]),
        "faults": (seen[-1] - seen[WARM_UP - 1]) / args.steps,
    }
    print(json.dumps(found))


if __name__ == "__main__":
    main()
