"""A whole run in virtual time."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from aladdin_mpi.options.algorithms import find_algorithm
from aladdin_mpi.options.run import SimulateOptions, check_cluster
from aladdin_mpi.run.checkpoint import resumed_moment
from aladdin_mpi.run.trainer import train
from aladdin_mpi.transport.virtual.engine import VirtualCluster


def simulate(options: SimulateOptions) -> dict[str, Any]:
    """Train on a modelled cluster; returns the summary.

    Raises:
        UserError: an unknown algorithm, or a cluster that does not hold the ranks.
    """
    algorithm = find_algorithm(options.algorithm)
    servers = options.servers if algorithm.has_servers else 0
    size = options.workers + servers + options.spares
    check_cluster(options, size)
    start = 0.0 if options.resume is None else resumed_moment(Path(options.resume))
    silence = options.worker_timeout or None
    cluster = VirtualCluster(size, options.cluster.placed(servers), options.seed, start, silence)
    summaries = cluster.run(lambda transport: train(options, transport))
    return next(filter(None, summaries), {})  # of the last rank 0
