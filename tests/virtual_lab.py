"""A small simulated cluster whose times are easy to compute by hand, and its ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport
from aladdin_mpi.transport.virtual.messages import QUANTUM

LATENCY, OVERHEAD = 100e-6, 10e-6
PIECE = QUANTUM / 1e9
"""Seconds of a full piece on a link of 1e9 bytes/s."""


Main = Callable[[VirtualTransport], Any]


def lab(hosts: int, **changes: object) -> Cluster:
    """Return hosts with links of 1e9 bytes/s and local paths of 1e10 bytes/s."""
    settings = {
        "bandwidth_gbit": 8,
        "latency_us": 100,
        "local_bandwidth_gbit": 80,
        "local_latency_us": 1,
        "message_overhead_us": 10,
    }
    return Cluster.model_validate({"hosts": hosts, **settings, **changes})


def run(size: int, main: Main, cluster: Cluster | None = None, seed: int = 0) -> list[Any]:
    return VirtualCluster(size, cluster or lab(2), seed).run(main)


def meta(nbytes: int) -> torch.Tensor:
    return torch.empty(nbytes, dtype=torch.uint8, device="meta")
