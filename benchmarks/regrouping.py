"""What the failure of one worker costs the others: continuing in place against a new group.

``python -m benchmarks.regrouping`` simulates both in virtual time. Algorithms that do not need
every worker continue in place; with a spare rank the same failure makes all ranks form a new group.
The cost is the longest time between two steps of a surviving worker, less that of a run without a
failure. A small model stands for a larger one: the network is slower by the ratio of their sizes.
"""

from __future__ import annotations

import argparse
import tempfile
from collections import defaultdict
from itertools import pairwise
from pathlib import Path

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

FEATURES = 256
PARAMETERS = FEATURES * (FEATURES + 1)
STEP_SECONDS = 0.4
RANKS_PER_HOST = 4


def longest_gap(algorithm: str, workers: int, spares: int, fails: bool, gbit: float) -> float:
    """Return the longest virtual time between two steps of a worker that does not fail."""
    size = workers + spares + 1
    failing = workers // 2
    deaths = {failing: 20.5 * STEP_SECONDS if fails else 1e6}
    hosts = Cluster(hosts=-(-size // RANKS_PER_HOST), bandwidth_gbit=gbit, deaths=deaths)
    steps: dict[int, list[float]] = defaultdict(list)
    data = TensorDataset(torch.randn(workers, FEATURES))

    def train(transport: Transport) -> None:
        torch.manual_seed(0)
        module = nn.Linear(FEATURES, FEATURES)
        run = DataParallel(
            module,
            transport=transport,
            algorithm=algorithm,
            samples=60 * workers,
            batch_size=1,
            lr=0.001,
            servers=1,
            spares=spares,
            compute_time=STEP_SECONDS,
            checkpoint_every="never",
            eval_every=0.0,
            run_dir=Path(folder) / "run",
            quiet=True,
        )
        for (inputs,) in run.batches(data):
            loss = module(inputs).square().mean()
            loss.backward()
            steps[transport.rank].append(transport.now())
            run.step(loss)

    with tempfile.TemporaryDirectory() as folder:
        VirtualCluster(size, hosts.placed(1), seed=0).run(train)
    living = [times for rank, times in steps.items() if rank != failing]
    pairs = [pair for times in living for pair in pairwise(times)]
    return max(later - earlier for earlier, later in pairs)


def main() -> None:
    """Print a table."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, default=63)
    parser.add_argument("--algorithms", nargs="+", default=["asp", "aladdin-ahead", "gosgd"])
    parser.add_argument("--gbit", type=float, default=10.0, help="bandwidth of a host's link")
    parser.add_argument(
        "--parameters", type=float, nargs="+", default=[1e6, 25.6e6], help="sizes of the model"
    )
    options = parser.parse_args()
    print(f"{'algorithm':<15}{'parameters':>12}{'in place, s':>14}{'new group, s':>14}")
    for algorithm in options.algorithms:
        for parameters in options.parameters:
            gbit = options.gbit * PARAMETERS / parameters
            costs = []
            for spares in (0, 1):
                plain = longest_gap(algorithm, options.workers, spares, False, gbit)
                costs.append(longest_gap(algorithm, options.workers, spares, True, gbit) - plain)
            print(f"{algorithm:<15}{parameters:>12.3g}{costs[0]:>14.2f}{costs[1]:>14.2f}")


if __name__ == "__main__":
    main()
