"""Measurements of the probe over MPI on all ranks; the values are not checked."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.errors import RefusedError, UserError
from aladdin_mpi.probing.cluster_file import check
from aladdin_mpi.probing.links import latencies, rates
from aladdin_mpi.probing.measured_cluster import measure_cluster
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.transport.mpi.engine import MpiTransport


def test_probe_measures_streams_of_all_ranks_at_once(transport: MpiTransport) -> None:
    size = transport.size
    flows = [(rank, (rank + 1) % size) for rank in range(size)]
    rates_by_flow = rates(transport, flows, 0.02)
    if transport.rank:
        assert rates_by_flow == []
    else:
        assert [len(flow_rates) for flow_rates in rates_by_flow] == [3] * size
        assert all(rate > 0 for flow_rates in rates_by_flow for rate in flow_rates)


def test_probe_returns_latencies_on_rank_0(transport: MpiTransport) -> None:
    measured = latencies(transport, (transport.size - 1, 0), 0.02)
    assert all(0 < seconds < 10 for seconds in measured)
    assert bool(measured) == (transport.rank == 0)


def test_probe_writes_the_cluster_file_on_rank_0(transport: MpiTransport, tmp_path: Path) -> None:
    options = ProbeOptions(out=tmp_path / "cluster.toml", seconds=1.0, device="cpu")
    measure_cluster(options, transport, cores=4)
    if transport.rank:
        assert not options.out.exists()
        return
    text = options.out.read_text()
    cluster_file = check(text, "cluster.toml")
    assert " fp32 on cpu, " in text
    assert (cluster_file.workers, cluster_file.cluster.hosts) == (transport.size, 1)
    assert cluster_file.cluster.memory_gbyte > 0
    assert cluster_file.cluster.local_latency_us > 0
    assert 0 < cluster_file.forward_share < 1


def test_probe_with_unknown_model_ends_on_all_ranks(
    transport: MpiTransport, tmp_path: Path
) -> None:
    options = ProbeOptions(out=tmp_path / "cluster.toml", model="no-model")
    with pytest.raises(RefusedError if transport.rank else UserError):
        measure_cluster(options, transport, cores=4)
    assert not options.out.exists()
