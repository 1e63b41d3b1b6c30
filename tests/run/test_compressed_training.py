"""Simulated training with compressed gradients and models sent as differences."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from aladdin_mpi.codec.dgc import DeepGradientCompression
from tests.compressed import Job, Outcome, WholeModels, run
from tests.quadratic import network

UNEQUAL = (1.0, 1.7, 2.9)
SLOW = network(hosts=5, bandwidth_gbit=0.3e-3, latency_us=1e4)
"""Links on which 200 KB take five seconds, that is five steps."""
WORKER = {"momentum": "worker"}
ALGORITHMS: list[dict[str, Any]] = [
    {"algorithm": "aladdin"},
    {"algorithm": "asp", "settings": {"asp": WORKER}},
    {"algorithm": "ssp", "settings": {"ssp": {"bound": 2, **WORKER}}},
    {"algorithm": "shat", "settings": {"shat": WORKER}},
]
UNHINDERED = [case for case in ALGORITHMS if case["algorithm"] != "ssp"]
"""SSP is omitted: it releases several workers at once, in the order of message sizes."""


def job(case: dict[str, Any], **changes: Any) -> Job:
    return replace(Job(slowdown=UNEQUAL, jitter=0.1, **case), **changes)


def name_of(case: dict[str, Any]) -> str:
    return str(case["algorithm"])


def check_same(a: Outcome, b: Outcome) -> None:
    assert torch.equal(a.model, b.model)
    assert torch.equal(a.locals, b.locals)


def coalesced(end: Outcome) -> int:
    return sum(worker.role.counts()["coalesced"] for worker in end.workers)


def left_of(end: Outcome) -> torch.Tensor:
    """Return each worker's unsent values, one worker per row."""
    rows = []
    for worker in end.workers:
        assert isinstance(worker.codec, DeepGradientCompression)
        assert worker.codec.left is not None
        rows.append(worker.codec.left)
    return torch.stack(rows)


@pytest.mark.sample(3)
@pytest.mark.parametrize("case", ALGORITHMS, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compression_with_ratio_one_equals_training_without_compression(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    this = job(case, samples=1200, dtype=dtype)
    dense, compressed = run(replace(this, ratio=None)), run(replace(this, ratio=1.0))
    assert compressed.accuracy() > 0.5
    check_same(dense, compressed)


def test_compression_with_ratio_one_equals_dense_training_with_coalesced_gradients() -> None:
    this = job(ALGORITHMS[0], samples=600, hidden=700, bucket_mb=0.2, cluster=SLOW)
    dense, compressed = run(replace(this, ratio=None)), run(replace(this, ratio=1.0))
    assert coalesced(compressed) > 5
    check_same(dense, compressed)


@pytest.mark.sample(2)
@pytest.mark.parametrize("case", UNHINDERED, ids=name_of)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_models_sent_as_differences_equal_whole_models(
    case: dict[str, Any], dtype: torch.dtype
) -> None:
    this = job(case, samples=1500, dtype=dtype, segments=2)
    differences, whole = run(this), run(replace(this, kind=WholeModels))
    check_same(differences, whole)
    sent = differences.bytes_sent(differences.servers)
    assert sent < 0.6 * whole.bytes_sent(whole.servers)


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ALGORITHMS, ids=name_of)
def test_compressed_training_converges_with_one_percent_of_values(case: dict[str, Any]) -> None:
    this = job(case, samples=4000)
    dense, compressed = run(replace(this, ratio=None)), run(this)
    assert dense.accuracy() > 0.85
    assert compressed.accuracy() > 0.75
    sent = compressed.bytes_sent(compressed.workers)
    assert sent < 0.1 * dense.bytes_sent(dense.workers)
    for server in compressed.servers:
        computed = sum(worker.role.counts()["computed"] for worker in compressed.workers)
        assert server.role.counts()["applied"] == computed == 200


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_compressed_training_loses_no_gradient(dtype: torch.dtype) -> None:
    """Without blending, the global model is the mean of the local models, except for unsent values.

    This holds also if gradients are coalesced before they are compressed.
    """
    settings = {"aladdin": {"alpha": 0.0, "ring": 1}, "momentum": 0.9, "weight_decay": 0.01}
    this = Job(settings=settings, dtype=dtype, samples=1000, cluster=SLOW, segments=2)
    end = run(replace(this, ratio=0.3, hidden=700, bucket_mb=0.2))
    assert coalesced(end) > 5
    waits = end.job.lr * left_of(end)
    assert waits.abs().mean() > 1e-4
    assert (end.locals[0] - end.locals[1]).abs().max() > 1e-2
    torch.testing.assert_close(end.model, (end.locals + waits).mean(0), rtol=1e-4, atol=1e-6)


def test_compression_clears_worker_momentum_of_sent_values() -> None:
    end = run(Job(samples=300, ratio=0.3))
    for worker in end.workers:
        velocity = worker.role.state_dict()["optimizer"]["velocity"]
        assert 0.2 < (velocity == 0).float().mean() < 0.9


def test_restored_worker_sends_its_compression_remainder() -> None:
    end = run(Job(samples=600))
    state = end.workers[0].role.state_dict()
    other = run(Job(samples=20)).workers[0]
    other.role.load_state_dict(state)
    assert isinstance(other.codec, DeepGradientCompression)
    assert other.codec.left is not None
    assert torch.equal(other.codec.left, left_of(end)[0])


@pytest.mark.sample(1)
@pytest.mark.parametrize("case", ALGORITHMS, ids=name_of)
def test_timed_computing_sends_similar_number_of_compressed_bytes(case: dict[str, Any]) -> None:
    """Models are an upper bound: the values that two gradients share are unknown."""
    this = job(case, samples=2000)
    real, timed = run(this), run(replace(this, timed=True))
    assert real.bytes_sent(real.workers) == pytest.approx(timed.bytes_sent(timed.workers), rel=0.1)
    assert timed.bytes_sent(timed.servers) < 3 * real.bytes_sent(real.servers)
    whole = run(replace(this, timed=True, ratio=None))
    assert timed.bytes_sent(timed.servers) < 0.5 * whole.bytes_sent(whole.servers)
