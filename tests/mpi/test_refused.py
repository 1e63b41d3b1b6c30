"""Non-finite gradients and damaged messages over MPI."""

from __future__ import annotations

from dataclasses import replace
from math import nan

import pytest
import torch

from aladdin_mpi.control.exchange import gather
from aladdin_mpi.control.refusals import Reason
from aladdin_mpi.transport.base import Transport
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.damage import DamagingTransport, is_values, sealed
from tests.mpi.test_algorithms import job_for
from tests.roles import Job, RankResult, run_rank


def run(job: Job, transport: MpiTransport) -> RankResult:
    """Train; every rank's model must be finite, and no gradient may be missing."""
    mine = run_rank(job, transport)
    for bucket in job.layout.buckets:
        if transport.rank in job.kind.holders(bucket.server, transport.size) or mine.leases:
            assert mine.role.part(bucket).isfinite().all()
    counts = gather(transport, mine.role.counts())
    for server in counts[: job.served_by]:
        assert server["applied"] == sum(count.get("computed", 0) for count in counts)
    transport.wait(transport.ibarrier())
    return mine


def await_refusals(transport: MpiTransport, mine: RankResult, wanted: int) -> None:
    """Wait for the refusals; the last of them may arrive after the end."""
    end = transport.now() + 20
    while len(mine.refusals) < wanted and transport.now() < end:
        transport.sleep(0.01)


@pytest.mark.parametrize("algorithm", ["aladdin", "bsp", "ar-sgd", "gosgd", "multistep"])
def test_non_finite_gradient_is_refused_over_mpi(transport: MpiTransport, algorithm: str) -> None:
    job = job_for(transport, algorithm)
    spoilt = job.workers - 1
    bad = torch.full((60,), nan)
    job = replace(job, spoil=lambda worker, step: bad if (worker, step % 9) == (spoilt, 3) else 0.0)
    mine = run(job, transport)
    steps = gather(transport, len(mine.leases))
    if transport.rank == 0:
        wanted = len([step for step in range(steps[-1]) if step % 9 == 3])
        assert wanted or not job.kind.lockstep  # one of many workers may take few steps
        await_refusals(transport, mine, wanted)
        refusals = [(r.reason, r.rank, r.bucket) for r in mine.refusals]
        assert refusals == [(Reason.NAN, transport.size - 1, 0)] * wanted


@pytest.mark.parametrize("algorithm", ["aladdin", "asp", "gosgd", "ad-psgd"])
def test_damaged_message_is_refused_over_mpi(transport: MpiTransport, algorithm: str) -> None:
    links: list[DamagingTransport] = []

    def wrap(inner: Transport) -> Transport:
        links.append(DamagingTransport(inner, lambda n, buffer: n % 7 == 5 and is_values(buffer)))
        return sealed(links[-1])

    job = job_for(transport, algorithm, wrap=wrap, settings={"gosgd": {"p": 0.5}})
    mine = run(job, transport)
    damaged = gather(transport, links[0].damaged)
    if transport.rank == 0:
        await_refusals(transport, mine, sum(map(len, damaged)))
        heard = sorted((r.rank, int(r.value)) for r in mine.refusals)
        assert heard == sorted((rank, tag) for rank, tags in enumerate(damaged) for tag in tags)
        assert heard or not job.kind.lockstep
