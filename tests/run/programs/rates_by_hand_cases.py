"""Train with learning rates set by the loop, and save the rates used in each case.

Argument: the cases, as JSON: pairs of an algorithm and whether gradients are sent early.
"""

from __future__ import annotations

import json
import os
import sys

from aladdin_mpi.options.algorithms import ALGORITHMS
from tests.run.rates_by_hand import train

for algorithm, wait_free in json.loads(sys.argv[1]):
    workers = 2 if not ALGORITHMS[algorithm].has_servers else 1
    name = f"{algorithm}-{wait_free}"
    used = train(workers, algorithm=algorithm, wait_free=wait_free, run_dir=name)
    rank = os.environ["OMPI_COMM_WORLD_RANK"]
    with open(f"{name}-{rank}.json", "w") as file:
        json.dump(used, file)
