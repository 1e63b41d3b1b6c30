"""Which workers are one worker of the algorithm together, where ``--node-sums`` asks for that."""

from __future__ import annotations

from aladdin_mpi.algorithms.host_first import host_groups
from aladdin_mpi.errors import UserError
from aladdin_mpi.options.algorithms import Algorithm
from aladdin_mpi.options.run import RunOptions
from aladdin_mpi.transport.base import Transport


def make_nodes(
    options: RunOptions, algorithm: Algorithm, transport: Transport, servers: int
) -> list[list[int]]:
    """The ranks of each node's workers; the first leads. None without the option.

    Raises:
        UserError: nodes have different numbers of workers, or are too few for the algorithm.
    """
    if not options.node_sums:
        return []
    nodes = host_groups(transport, servers, options.node_size)
    sizes = sorted({len(node) for node in nodes})
    if len(sizes) > 1:
        counts = " and ".join(map(str, sizes))
        raise UserError(
            f"--node-sums: expected as many workers on every node, got {counts}; start as many on "
            "each host (servers are the first ranks, and are none of them), or add --node-size "
            "with a number that divides all"
        )
    least = max(algorithm.least_workers, servers)
    if len(nodes) < least:
        raise UserError(
            f"--node-sums: expected at least {least} nodes for --algorithm {algorithm.name}"
            + (f" with {servers} servers" if servers > 1 else "")
            + f", got {len(nodes)}; use more hosts, or leave the option out"
        )
    return nodes
