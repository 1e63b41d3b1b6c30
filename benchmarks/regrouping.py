"""Measure the cost of a worker's failure for the others: in place, and with a new group.

    python -m benchmarks.regrouping --save
    python -m benchmarks.regrouping --quick

The runs are simulated. Algorithms that do not need every worker continue in place. With a spare
rank the same failure makes all ranks form a new group.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from aladdin_mpi import DataParallel
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.session.session import SETTLE_SECONDS
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.virtual.engine import VirtualCluster
from benchmarks import harness, quick
from benchmarks.bounds import whole
from benchmarks.harness import Findings
from benchmarks.machine import machine

FEATURES = 256
PARAMETERS = FEATURES * (FEATURES + 1)
STEP_SECONDS, STEPS, FAILS_AT = 0.4, 40, 20.5
GBIT, RANKS_PER_HOST = 10.0, 4
SIZES = {"1 M": 1e6, "ResNet-50": 25.6e6}

TITLE = "Cost of a worker's failure for the other workers"
NOTES = f"""\
Simulated: {{workers}} workers and one server, {RANKS_PER_HOST} ranks per host, links of {GBIT:g}
Gbit/s, steps of {STEP_SECONDS} s. A small model stands for a larger one: the links are slower by
the ratio of their sizes. One worker fails after {FAILS_AT:g} steps. Cost: the longest time between
two steps of any other worker, minus that of a run without a failure. In place: the others continue
in their group. New group: there is a spare rank, and all ranks form a new group, whose rank 0
merges their states; minus the {2 * SETTLE_SECONDS:g} s that the simulator always allows for the
set-up of a group."""
QUICK = {"algorithms": ["asp"], "models": ["1 M"], "workers": 3}


def longest_gap(algorithm: str, workers: int, spares: int, fails: bool, gbit: float) -> float:
    """Return the longest simulated time between two steps of a worker that does not fail."""
    size, failing = workers + spares + 1, 1 + workers // 2
    failures = {failing: FAILS_AT * STEP_SECONDS if fails else 1e6}
    hosts = Cluster(hosts=-(-size // RANKS_PER_HOST), bandwidth_gbit=gbit, failures=failures)
    data = TensorDataset(torch.randn(workers, FEATURES))
    steps: dict[int, list[float]] = defaultdict(list)

    def train(transport: Transport) -> None:
        torch.manual_seed(0)
        module = nn.Linear(FEATURES, FEATURES)
        run = DataParallel(
            module,
            transport=transport,
            algorithm=algorithm,
            samples=STEPS * workers,
            batch_size=1,
            lr=0.001,
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

    with tempfile.TemporaryDirectory(prefix="regrouping-") as folder:
        VirtualCluster(size, hosts.placed(1), seed=0).run(train)
    others = [times for rank, times in steps.items() if rank != failing]
    return max(later - earlier for times in others for earlier, later in pairwise(times))


def row(algorithm: str, model: str, workers: int) -> dict[str, Any]:
    """Return a row of the table."""
    gbit = GBIT * PARAMETERS / SIZES[model]
    in_place, new_group = (
        longest_gap(algorithm, workers, spares, True, gbit)
        - longest_gap(algorithm, workers, spares, False, gbit)
        for spares in (0, 1)
    )
    return {
        "algorithm": algorithm,
        "model": model,
        "in place, s": f"{in_place:.2f}",
        "new group, s": f"{new_group - 2 * SETTLE_SECONDS:.2f}",
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark and return its exit status."""
    argv = sys.argv[1:] if argv is None else argv
    parser = harness.make_parser("regrouping", __doc__.splitlines()[0])
    add = parser.add_argument
    add("--algorithms", nargs="+", default=["asp", "easgd"], metavar="NAME", help="which")
    add("--models", nargs="+", choices=SIZES, default=list(SIZES), help="sizes of the model")
    add("--workers", type=whole(3), default=63, help="workers of each run")
    args: argparse.Namespace = quick.parse(parser, argv, QUICK)
    facts = machine()
    rows = [row(name, model, args.workers) for name in args.algorithms for model in args.models]
    notes = NOTES.format(**vars(args))
    return harness.publish("regrouping", argv, args, facts, Findings(TITLE, rows, notes, []))


if __name__ == "__main__":
    sys.exit(harness.run_main(main))
