"""Non-finite gradients are refused at their worker, and have no effect."""

from __future__ import annotations

from math import inf, isnan, nan
from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.options.algorithms import ALGORITHMS
from tests.quadratic import Quadratic
from tests.roles import Job, Outcome, any_network, run

NAMES = sorted(ALGORITHMS)
STEPS = (1, 2, 6)
"""Steps of the worker whose gradients are spoilt."""
PLACE = 40
"""Index of the spoilt value, out of 60; buckets have 13."""


def spoilt(worker: int, value: float) -> Any:
    noise = torch.zeros(60)
    noise[PLACE] = value
    return lambda index, step: noise if index == worker and step in STEPS else 0.0


def check_unharmed(outcome: Outcome) -> None:
    outcome.check_accounts()
    assert outcome.model.isfinite().all()
    assert outcome.locals.isfinite().all()
    for rank in outcome.ranks:
        state = rank.role.state_dict()
        assert not [name for name, value in _tensors(state) if not value.isfinite().all()]


def _tensors(state: Any, name: str = "") -> list[tuple[str, Tensor]]:
    if isinstance(state, dict):
        return [pair for key in state for pair in _tensors(state[key], f"{name}.{key}")]
    return [(name, state)] if isinstance(state, Tensor) else []


@pytest.mark.sample(6)
@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("algorithm", NAMES)
def test_non_finite_gradients_are_refused_by_every_algorithm(algorithm: str, seed: int) -> None:
    wires = ["fp32", "fp32" if algorithm == "aladdin-local" else "bf16"]
    job = Job(
        algorithm,
        servers=2,
        numel=60,
        bucket=13,
        samples=160,
        segments=2,
        settings={"wire": wires[seed], "wait_free": seed == 0},
        jitter=0.3,
        cluster=any_network(seed, 4),
        seed=seed,
        spoil=spoilt(worker=1, value=[nan, -inf][seed]),
    )
    outcome = run(job)
    check_unharmed(outcome)
    worker = outcome.workers[1]
    spoilt_tickets = [worker.leases[step] for step in STEPS]
    heard = outcome.ranks[0].refusals
    (bucket,) = (b for b in job.layout.buckets if b.start <= PLACE < b.stop)
    assert [refusal.reason for refusal in heard] == [[1, 2][seed]] * 3
    assert {(refusal.rank, refusal.bucket) for refusal in heard} == {
        (job.served_by + 1, bucket.index)
    }
    assert [refusal.sample for refusal in heard] == [lease.start for lease in spoilt_tickets]
    assert [refusal.in_a_row for refusal in heard] == [1, 2, 1]
    assert [rank.role.counts().get("refused", 0) for rank in outcome.workers] == [0, 3, 0, 0]
    lost = [r for _, r in outcome.ranks[0].reports if r.samples and isnan(r.loss)]
    assert len(lost) == 3
    # The other gradients still converge towards the minimum.
    optimum = Quadratic(60).optimum
    assert (outcome.model - optimum).norm() < 0.95 * (outcome.first - optimum).norm()
