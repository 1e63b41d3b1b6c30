"""AR-SGD equals a single process with the n-fold batch, on the modelled network."""

from __future__ import annotations

import pytest
import torch

from aladdin_mpi.options.cluster import Cluster
from tests.drawn_jobs import any_lockstep_job
from tests.quadratic import Quadratic
from tests.roles import Job, any_network, run, single_process

MOMENTUM = {"momentum": 0.9, "weight_decay": 0.01}


@pytest.mark.parametrize("workers", [1, 2, 3, 5, 8, 16])
@pytest.mark.parametrize("nesterov", [False, True])
def test_ar_sgd_equals_single_process_with_n_fold_batch(workers: int, nesterov: bool) -> None:
    job = Job(
        "ar-sgd",
        workers=workers,
        numel=50,
        bucket=11,
        # The last round is uneven, or too small to give every worker a sample.
        samples=20 * workers + 3,
        settings={**MOMENTUM, "nesterov": nesterov},
        schedule=lambda samples: 0.05 if samples < 40 else 0.01,
        slowdown={0: 2.0},
        cluster=any_network(workers, workers),
    )
    end = run(job)
    end.check_accounts()
    torch.testing.assert_close(end.model, single_process(job), rtol=1e-4, atol=1e-5)
    for mine in end.locals:
        assert torch.equal(mine, end.model)


@pytest.mark.parametrize("seed", range(32))
def test_ar_sgd_counters_balance_under_any_conditions(seed: int) -> None:
    end = run(any_lockstep_job("ar-sgd", seed))
    end.check_accounts()
    for mine in end.locals:
        assert torch.equal(mine, end.model)


def test_ar_sgd_converges_to_known_minimum() -> None:
    job = Job("ar-sgd", workers=5, samples=4000, noise=0.0, schedule=lambda samples: 0.2)
    job.settings = {"momentum": 0.5, "weight_decay": 0.0}
    assert (run(job).model - Quadratic(job.numel).optimum).abs().max() < 0.01


def test_ar_sgd_sums_overlap_with_backward() -> None:
    """If the sum of a bucket takes as long as its backward pass, most of it is hidden."""
    seconds = {}
    for wait_free in (True, False):
        job = Job(
            "ar-sgd",
            workers=2,
            numel=200_000,
            bucket=20_000,
            samples=40,
            noise=0.0,
            settings={"momentum": 0.0, "weight_decay": 0.0, "wait_free": wait_free},
            # 0.8 MB, half of it twice in each direction, takes two thirds of a second.
            cluster=Cluster.model_validate({"hosts": 2, "bandwidth_gbit": 0.8e6 * 8e-9 / 0.66}),
        )
        seconds[wait_free] = max(worker.traffic.waiting for worker in run(job).workers)
    assert seconds[False] > 5 * 0.6
    assert seconds[True] < 0.35 * seconds[False]
