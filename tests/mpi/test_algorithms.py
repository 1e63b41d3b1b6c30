"""Every algorithm over MPI on a small problem: counters, and equality with a single process."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.allreduce import horovod
from aladdin_mpi.control.exchange import broadcast, gather
from aladdin_mpi.options.algorithms import ALGORITHMS, find_algorithm
from aladdin_mpi.transport.mpi.engine import MpiTransport
from tests.quadratic import Quadratic
from tests.roles import Job, flat, flat_start, run_rank, single_process

CPU = torch.device("cpu")
NO_HOROVOD = horovod.obstacle(CPU, torch.float32)


def job_for(transport: MpiTransport, algorithm: str, **values: Any) -> Job:
    """Return a job for the available ranks; skip the test if there are too few."""
    kind = find_algorithm(algorithm)
    servers = 0 if not kind.has_servers else 2 if transport.size >= 4 else 1
    workers = transport.size - servers
    if workers < kind.least_workers:
        pytest.skip(f"{algorithm} needs {kind.least_workers} workers")
    given: dict[str, Any] = {"numel": 60, "bucket": 13, "samples": 157, **values}
    return Job(algorithm, workers=workers, servers=servers, **given)


def train(job: Job, transport: MpiTransport) -> tuple[Tensor, list[bool]]:
    """Train and check the counters on rank 0.

    Returns the global model, and for every worker whether its model equals it.
    """
    mine = run_rank(job, transport)
    role, layout = mine.role, job.layout
    facts = {
        "counts": role.counts(),
        "sizes": [lease.size for lease in mine.leases],
        "weights": [role.weight(bucket) for bucket in layout.buckets],
        "parts": [
            role.part(b).tolist()
            if transport.rank in job.kind.holders(b.server, transport.size)
            else []
            for b in layout.buckets
        ],
    }
    everyone = gather(transport, facts)
    model: list[float] = []
    if transport.rank == 0:
        assert sum(size for rank in everyone for size in rank["sizes"]) == job.samples
        computed = sum(len(rank["sizes"]) for rank in everyone)
        assert computed == sum(rank["counts"].get("computed", 0) for rank in everyone)
        for server in everyone[: job.served_by]:
            assert server["counts"]["applied"] + server["counts"]["dropped"] == computed
        for bucket in layout.buckets:
            holders = job.kind.holders(bucket.server, transport.size)
            weights = torch.tensor([everyone[r]["weights"][bucket.index] for r in holders])
            parts = torch.tensor([everyone[r]["parts"][bucket.index] for r in holders])
            model += (weights @ parts / weights.sum()).tolist()
    whole = torch.tensor(broadcast(transport, model))
    is_worker = transport.rank >= job.served_by
    same = gather(transport, not is_worker or torch.equal(flat(role, layout), whole))
    return whole, same


@pytest.mark.parametrize("wire", ["fp32", "bf16", "int8"])
@pytest.mark.parametrize("algorithm", sorted(ALGORITHMS))
def test_algorithm_converges_and_its_counters_balance(
    transport: MpiTransport, algorithm: str, wire: str
) -> None:
    if wire != "fp32" and transport.size != 3:
        pytest.skip("once is enough")
    kind = find_algorithm(algorithm)
    if wire == "int8" and not (kind.quantises or kind.all_reduces):
        pytest.skip("is refused")
    if wire == "bf16" and algorithm == "aladdin-local":
        pytest.skip("is refused")
    settings = {
        "wire": wire,
        "momentum": 0.5,
        "weight_decay": 0.0,
        "async_diloco": {"steps": 4, "outer_momentum": 0.5},
        "easgd": {"alpha": 0.2},
        "gosgd": {"p": 0.3},
    }
    job = job_for(
        transport,
        algorithm,
        samples=401,
        segments=2,
        noise=0.0,
        schedule=lambda samples: 0.2,
        settings=settings,
    )
    before = (flat_start(60) - Quadratic(60).optimum).norm()
    after = (train(job, transport)[0] - Quadratic(60).optimum).norm()
    assert after < 0.6 * before


@pytest.mark.parametrize(
    ("algorithm", "settings"),
    [
        ("bsp", {}),
        ("bsp", {"bsp": {"host_first": True}}),
        ("ar-sgd", {"ar_sgd": {"allreduce": "mpi"}}),
        ("ar-sgd", {"ar_sgd": {"allreduce": "torch"}}),
        pytest.param(
            "ar-sgd",
            {"ar_sgd": {"allreduce": "horovod"}},
            marks=pytest.mark.skipif(NO_HOROVOD is not None, reason=NO_HOROVOD or ""),
        ),
        ("multistep", {}),
    ],
    ids=str,
)
def test_synchronous_algorithm_equals_one_process_with_the_n_fold_batch(
    transport: MpiTransport, algorithm: str, settings: dict[str, Any]
) -> None:
    common = {"momentum": 0.9, "weight_decay": 0.01}
    job = job_for(transport, algorithm, settings={**common, **settings})
    model, same = train(job, transport)
    torch.testing.assert_close(model, single_process(job), rtol=1e-4, atol=1e-5)
    assert all(same)
