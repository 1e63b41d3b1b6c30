"""The probe's measurements over MPI, by all ranks; what they say of a machine is not judged."""

from __future__ import annotations

from pathlib import Path

import pytest

from aladdin_mpi.errors import RefusedError, UserError
from aladdin_mpi.probing.cluster_file import check
from aladdin_mpi.probing.links import latencies, rates
from aladdin_mpi.probing.measured_cluster import measure_cluster
from aladdin_mpi.probing.options import ProbeOptions
from aladdin_mpi.transport.mpi.engine import MpiTransport


def test_streams_of_all_ranks_at_once(transport: MpiTransport) -> None:
    size = transport.size
    flows = [(rank, (rank + 1) % size) for rank in range(size)]
    found = rates(transport, flows, 0.02)
    if transport.rank:
        assert found == []
    else:
        assert [len(of_flow) for of_flow in found] == [3] * size
        assert all(rate > 0 for of_flow in found for rate in of_flow)


def test_latencies_are_told_at_rank_0(transport: MpiTransport) -> None:
    found = latencies(transport, (transport.size - 1, 0), 0.02)
    assert all(0 < seconds < 10 for seconds in found)
    assert bool(found) == (transport.rank == 0)


def test_rank_0_writes_what_all_have_measured(transport: MpiTransport, tmp_path: Path) -> None:
    options = ProbeOptions(out=tmp_path / "cluster.toml", seconds=1.0, device="cpu")
    measure_cluster(options, transport, cores=4)
    if transport.rank:
        assert not options.out.exists()
        return
    text = options.out.read_text()
    found = check(text, "cluster.toml")
    assert " fp32 on cpu, " in text
    assert (found.workers, found.cluster.hosts) == (transport.size, 1)
    assert found.cluster.memory_gbyte > 0
    assert found.cluster.local_latency_us > 0
    assert 0 < found.forward_share < 1


def test_a_model_that_is_not_there_ends_all_ranks(transport: MpiTransport, tmp_path: Path) -> None:
    options = ProbeOptions(out=tmp_path / "cluster.toml", model="no-model")
    with pytest.raises(RefusedError if transport.rank else UserError):
        measure_cluster(options, transport, cores=4)
    assert not options.out.exists()
