"""Sums that surviving ranks repeat are right, whenever further ranks fail."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from aladdin_mpi.allreduce.messages import TAGS, RingAllReduce
from aladdin_mpi.allreduce.surviving import SurvivingSums
from aladdin_mpi.errors import UserError
from aladdin_mpi.flat.layout import Bucket
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.base import Request, Transport
from aladdin_mpi.transport.virtual.endpoint import VirtualTransport
from aladdin_mpi.transport.virtual.engine import VirtualCluster

SIZE, STEPS = 5, 4
NUMEL = 40_000
"""Values of a bucket, so that a sum takes a ring."""
BUCKETS = [Bucket(0, 0, NUMEL, 0), Bucket(1, NUMEL, 2 * NUMEL, 0)]
SECONDS = 4 * NUMEL / 1e9
"""The time in which a link carries a bucket."""
FIRST = 10 * SECONDS


def values_of(rank: int, step: int, bucket: Bucket) -> Tensor:
    return torch.full((bucket.numel,), float(10**rank + 1000 * step + bucket.index))


def train(
    transport: Transport, made: list[Tensor], assists: bool = False
) -> list[tuple[float, ...]]:
    """Return the value of each bucket's sum in each step; check that all of a sum are equal.

    With ``assists``, each rank takes part in the sums of others before it waits for its own.
    """

    def new_vector() -> Tensor:
        made.append(torch.zeros(2 * NUMEL))
        return made[-1]

    sums, found = SurvivingSums("ring", transport, new_vector, torch.float32, BUCKETS), []
    for step in range(STEPS):
        for bucket in BUCKETS:
            sums.start(values_of(transport.rank, step, bucket), bucket)
        if assists:
            transport.sleep(4 * transport.rank * SECONDS)
            sums.assist()
        result = sums.finish()
        for bucket, total in result.totals:
            expected = sum(values_of(rank, step, bucket)[0] for rank in result.ranks)
            assert torch.equal(total, torch.full_like(total, float(expected)))
        found.append(tuple(float(total[0]) for _, total in result.totals))
    sums.settle()
    return found


def test_sums_received_while_assisting_are_of_the_ranks_before_the_failure() -> None:
    for tenths in range(0, 600, 10):
        cluster = Cluster(
            hosts=SIZE, bandwidth_gbit=8, latency_us=5, failures={2: FIRST + tenths * SECONDS / 10}
        )
        results = VirtualCluster(SIZE, cluster, 0).run(
            lambda transport: train(transport, [], assists=True)
        )
        alive = [results[rank] for rank in range(SIZE) if rank != 2]
        assert alive == [alive[0]] * len(alive)


@pytest.mark.parametrize("first", [1, 4])
@pytest.mark.parametrize("second", [2, 3])
def test_sums_are_equal_on_all_ranks_if_two_fail(first: int, second: int) -> None:
    for delay in range(0, 160, 10):
        failures = {first: FIRST, second: FIRST + delay * SECONDS / 10}
        cluster = Cluster(hosts=SIZE, bandwidth_gbit=8, latency_us=5, failures=failures)
        results = VirtualCluster(SIZE, cluster, 0).run(lambda transport: train(transport, []))
        alive = [results[rank] for rank in range(SIZE) if rank not in failures]
        assert all(result == alive[0] for result in alive), delay


def test_float64_is_summed_in_float64_after_a_failure() -> None:
    def main(transport: Transport) -> list[float]:
        sums = SurvivingSums(
            "auto",
            transport,
            lambda: torch.zeros(9, dtype=torch.float64),
            torch.float64,
            [Bucket(0, 0, 9, 0)],
        )
        errors = []
        for _ in range(3):
            transport.sleep(1.0)
            sums.start(
                torch.full((9,), 0.1 + transport.rank, dtype=torch.float64), Bucket(0, 0, 9, 0)
            )
            result = sums.finish()
            expected = sum(0.1 + rank for rank in result.ranks)
            errors.append(abs(float(result.totals[0][1][0]) - expected))
        sums.settle()
        return errors

    failures = {2: 1.5}
    results = VirtualCluster(4, Cluster(hosts=4, failures=failures), 0).run(main)
    survivors = [errors for errors in results if errors is not None]
    assert len(survivors) == 3 and all(max(errors) < 1e-15 for errors in survivors)


def test_memory_of_an_abandoned_sum_is_not_used_again() -> None:
    """Messages of ranks that have not abandoned it yet may still arrive there."""

    def main(transport: Transport) -> int:
        made: list[Tensor] = []
        train(transport, made)
        return len(made)

    cluster = Cluster(hosts=SIZE, bandwidth_gbit=8, latency_us=5, failures={4: FIRST})
    results = VirtualCluster(SIZE, cluster, 0).run(main)
    assert all(made is not None and made > 2 for made in results[:4])


def sum_slowly(
    transport: Transport, name: str, dtype: torch.dtype, steps: int, numel: int, lag: float
) -> None:
    """Start sums of ranks at different times, and check them; they are exact in bf16."""
    buckets = [Bucket(0, 0, numel, 0), Bucket(1, numel, 2 * numel, 0)]
    sums = SurvivingSums(name, transport, lambda: torch.zeros(2 * numel), dtype, buckets)
    for step in range(steps):
        for bucket in buckets:
            transport.sleep(lag * ((transport.rank + step) % 4))
            value = float((transport.rank + 1) * (1 + step % 2))
            sums.start(torch.full((bucket.numel,), value), bucket)
        result = sums.finish()
        expected = sum((rank + 1) * (1 + step % 2) for rank in result.ranks)
        for _, total in result.totals:
            assert torch.equal(total, torch.full_like(total, float(expected))), step
    sums.settle()


KINDS = [("ring", torch.float32), ("auto", torch.bfloat16)]


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_sums_are_right_after_a_dozen_failures(name: str, dtype: torch.dtype) -> None:
    """Messages of all abandoned sums may still arrive."""
    failures = {13 - number: (8 + 6 * number) * SECONDS for number in range(12)}
    cluster = Cluster(hosts=14, bandwidth_gbit=8, latency_us=5, failures=failures)
    VirtualCluster(14, cluster, 0).run(
        lambda each: sum_slowly(each, name, dtype, 30, NUMEL, 0.3 * SECONDS)
    )


@pytest.mark.parametrize(("name", "dtype"), KINDS)
def test_sends_of_abandoned_sums_end(
    name: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Closing the transport would wait for them."""
    sent: list[tuple[int, int, Request]] = []
    isend = VirtualTransport.isend

    def noted(self: VirtualTransport, buffer: Tensor, dest: int, *given: Any) -> Request:
        request = isend(self, buffer, dest, *given)
        sent.append((self.rank, dest, request))
        return request

    monkeypatch.setattr(VirtualTransport, "isend", noted)
    for delay in range(12):
        sent.clear()
        cluster = Cluster(
            hosts=4, bandwidth_gbit=8, latency_us=5, failures={3: FIRST + delay * SECONDS}
        )
        VirtualCluster(4, cluster, 0).run(
            lambda each: sum_slowly(each, name, dtype, 4, 5 * NUMEL, 2.5 * SECONDS)
        )
        assert not [each for each in sent if 3 not in each[:2] and not each[2].done], delay


def test_more_buckets_than_tags_are_refused() -> None:
    def main(transport: Transport) -> None:
        RingAllReduce(transport, torch.device("cpu"), torch.float32).start(torch.ones(9), TAGS)

    with pytest.raises(UserError, match="--bucket-mb: "):
        VirtualCluster(2, Cluster(hosts=2), 0).run(main)
