"""Algorithms without servers over MPI: rank 0 is a worker too, and owns the sample budget."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.gossip_lab import starts
from tests.quadratic import Quadratic
from tests.roles import Job, flat, run_rank

VARIANTS: list[tuple[str, dict[str, Any]]] = [
    ("sgp", {}),
    ("osgp", {"osgp": {"tau": 2}}),
    ("osgp", {"osgp": {"order": "push-first"}}),
    ("gosgd", {"gosgd": {"p": 0.3}}),
    ("gosgd", {"gosgd": {"p": 1.0}, "wire": "bf16"}),
    ("ad-psgd", {}),
    ("ad-psgd", {"ad_psgd": {"graph": "exponential"}, "wire": "bf16"}),
]


def total(transport: MpiTransport, values: Tensor) -> Tensor:
    """Return the sum over all ranks."""
    transport.wait(transport.iallreduce(values))
    return values


def test_message_handler_receives_messages_of_its_own_rank(transport: MpiTransport) -> None:
    """The handler can wake its rank by a message to itself."""
    seen: list[tuple[int, int]] = []

    def handler(source: int, message: Tensor) -> None:
        seen.append((source, message.numel()))
        if len(seen) == 3:
            transport.isend(torch.empty(0), transport.rank, 71)

    transport.on_message(70, 400_000, handler)
    wake = transport.irecv(torch.empty(0), transport.rank, 71)
    for length in (0, 8, 400_000):
        transport.isend(torch.zeros(length, dtype=torch.uint8), transport.rank, 70)
    transport.wait(wake)
    assert seen == [(transport.rank, 0), (transport.rank, 8), (transport.rank, 400_000)]
    transport.wait(transport.ibarrier())


@pytest.mark.parametrize(("algorithm", "settings"), VARIANTS)
@pytest.mark.parametrize("numel", [17, 40_000])
def test_gossip_run_keeps_its_sample_budget_and_weights(
    transport: MpiTransport, algorithm: str, settings: dict[str, Any], numel: int
) -> None:
    n = transport.size
    if numel == 40_000 and n != 3:
        pytest.skip("once is enough")
    steps = 200 if numel == 17 else 30
    job = Job(
        algorithm,
        workers=n,
        numel=numel,
        bucket=numel // 3,
        samples=4 * n * steps + 3,
        segments=3,
        settings={"weight_decay": 0.0, **settings},
        schedule=lambda samples: 0.05,
        noise=0.0,
        start=lambda rank: starts(rank, numel),
    )
    result = run_rank(job, transport)
    used = sum(lease.size for lease in result.leases)
    assert total(transport, torch.tensor([used])).item() == job.samples
    counts = torch.tensor([result.role.counts()["computed"], -len(result.leases)])
    assert total(transport, counts).sum() == 0
    expected = 1.0 if algorithm == "gosgd" else float(n)
    for bucket in job.layout.buckets:
        weight = torch.tensor([result.role.weight(bucket)], dtype=torch.float64)
        assert total(transport, weight).item() == pytest.approx(expected, abs=1e-12)
    if numel == 17:
        # On a busy machine, workers that do not run in lockstep may get few samples each.
        near = 0.05 if job.kind.lockstep else 0.5
        optimum = Quadratic(numel).optimum
        away = [(flat(result.role, job.layout) - optimum).norm().item()]
        closest = min(broadcast(transport, gather(transport, away)))[0]
        assert closest < near * optimum.norm()
        assert not job.kind.lockstep or away[0] < near * optimum.norm()


@pytest.mark.parametrize("algorithm", ["sgp", "osgp", "gosgd", "ad-psgd"])
def test_gossip_without_gradients_keeps_the_mean(transport: MpiTransport, algorithm: str) -> None:
    numel, n = 5000, transport.size
    job = Job(
        algorithm,
        workers=n,
        numel=numel,
        bucket=900,
        samples=4 * n * 25,
        settings={"gosgd": {"p": 0.5}},
        schedule=lambda samples: 0.0,
        start=lambda rank: starts(rank, numel),
    )
    role = run_rank(job, transport).role
    values, weights = torch.zeros(numel).double(), torch.zeros(numel).double()
    for bucket in job.layout.buckets:
        values[bucket.part] = role.part(bucket).double() * role.weight(bucket)
        weights[bucket.part] = role.weight(bucket)
    mean = total(transport, values) / total(transport, weights)
    first = torch.stack([starts(rank, numel) for rank in range(n)]).double()
    assert torch.allclose(mean, first.mean(0), atol=1e-5)
    # Mixing stays within the convex hull; how far inside depends on which workers mix.
    farthest = (0.5 if job.kind.lockstep else 1.0) * (first - mean).norm(dim=1).max()
    assert (flat(role, job.layout) - mean).norm() <= farthest + 1e-4
