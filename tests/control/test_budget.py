"""Sample budget: every sample is leased once, and a stop ends the leases early."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from aladdin_mpi.control.budget import Budget, SampleClient, SampleLease, WorkerReport
from aladdin_mpi.options.cluster import Cluster
from aladdin_mpi.transport.virtual.engine import VirtualCluster, VirtualTransport

ENOUGH = 1000.0
"""Simulated seconds after which every worker has ended."""
Reports = list[tuple[int, WorkerReport]]
Keep = Callable[[VirtualTransport, Budget], None]


def draw_all(
    transport: VirtualTransport, batch: int, pause: Callable[[], float]
) -> list[SampleLease]:
    """Lease samples one step ahead until none remain, as a worker does."""
    draws = SampleClient(transport)
    leases: list[SampleLease] = []
    draws.request(batch, WorkerReport())
    while (lease := draws.take()).size:
        draws.request(batch, WorkerReport(samples=lease.size, loss=1.0, steps=len(leases)))
        leases.append(lease)
        transport.sleep(pause())
    return leases


def run(
    workers: int, total: int, keep: Keep, seed: int = 0, batch: int | None = None
) -> tuple[Budget, Reports, list[list[SampleLease]]]:
    """Let workers of random speeds and batch sizes lease samples; return every worker's leases."""

    def main(transport: VirtualTransport) -> object:
        if transport.rank == 0:
            reports: Reports = []
            budget = Budget(transport, total, lambda rank, report: reports.append((rank, report)))
            keep(transport, budget)
            transport.sleep(ENOUGH)
            return budget, reports
        r = random.Random(1000 * seed + transport.rank)
        speed, size = r.uniform(0.01, 1), batch or r.randint(1, 9)
        return draw_all(transport, size, lambda: r.uniform(0, speed))

    cluster = Cluster(hosts=workers, delay_us=r_delay(seed))
    first, *leases = VirtualCluster(workers + 1, cluster, seed).run(main)
    assert isinstance(first, tuple)
    return *first, leases


def r_delay(seed: int) -> float:
    return random.Random(seed).choice([0.0, 1e3, 1e6])


def open_all(transport: VirtualTransport, budget: Budget) -> None:
    budget.open(budget.total)


def covered(leases: list[list[SampleLease]]) -> int:
    """Check that leases have no gap or overlap, and return their end."""
    position = 0
    for start, size, *_ in sorted(lease for own in leases for lease in own):
        assert start == position
        position += size
    return position


@pytest.mark.parametrize("seed", range(20))
def test_every_sample_is_leased_once(seed: int) -> None:
    r = random.Random(seed)
    workers, total = r.randint(1, 6), r.randint(1, 300)
    budget, _, leases = run(workers, total, open_all, seed)
    assert covered(leases) == total == budget.drawn
    assert budget.used_up


def test_fast_worker_leases_more_samples() -> None:
    _, _, leases = run(5, 600, open_all, seed=2, batch=1)
    counts = sorted(len(own) for own in leases)
    assert counts[0] * 2 < counts[-1]


def test_only_the_last_lease_is_short() -> None:
    _, _, leases = run(3, 100, open_all, batch=7)
    sizes = [lease.size for lease in sorted(t for own in leases for t in own)]
    assert sizes == [7] * 14 + [2]


@pytest.mark.parametrize("samples", [1, 7, 31, 32, 33])
def test_last_round_of_leases_completes_an_epoch(samples: int) -> None:
    """The rounds of an epoch give each worker as many samples as its shard has."""
    workers, batch = 3, 4
    rounds = [SampleLease(0, 0, min(workers * batch, samples - at)) for at in range(0, samples, 12)]
    for worker in range(workers):
        granted = sum(each.size_of(worker, workers) for each in rounds)
        assert granted == len(range(worker, samples, workers))


def test_some_workers_get_no_lease_if_samples_are_few() -> None:
    _, _, leases = run(5, 2, open_all, batch=1)
    assert sorted(len(own) for own in leases) == [0, 0, 0, 1, 1]


def test_leases_of_a_segment_end_at_its_limit() -> None:
    budget, _, leases = run(3, 100, lambda _, budget: budget.open(40))
    assert covered(leases) == 40 == budget.drawn
    assert not budget.used_up


def test_segment_limit_beyond_the_run_is_the_end_of_the_run() -> None:
    _, _, leases = run(3, 100, lambda _, budget: budget.open(1000))
    assert covered(leases) == 100


def test_stop_ends_leases_of_the_segment() -> None:
    def keep(transport: VirtualTransport, budget: Budget) -> None:
        budget.open(budget.total)
        transport.sleep(3.0)
        budget.stop()

    budget, _, leases = run(3, 100_000, keep, batch=1)
    assert 0 < covered(leases) == budget.drawn < 100_000
    assert not budget.used_up
    assert budget.total == 100_000


@pytest.mark.parametrize("seed", range(5))
def test_segment_can_end_after_a_multiple_of_rounds(seed: int) -> None:
    """Workers request up to several rounds ahead, and a failure changes the rounds' size."""

    def main(transport: VirtualTransport) -> object:
        if transport.rank == 0:
            budget = Budget(
                transport,
                100_000,
                lambda rank, report: budget.stop_after(7) if transport.now() > 3.0 else None,
                lockstep=range(1, 4),
            )
            budget.open(budget.total)
            transport.sleep(ENOUGH)
            return budget
        r = random.Random(10 * seed + transport.rank)
        return draw_all(transport, 2, lambda: r.uniform(0, 0.2))

    cluster = Cluster(failures={3: 3.1} if seed % 2 else {})
    budget, *leases = VirtualCluster(4, cluster, seed).run(main)
    assert isinstance(budget, Budget)
    assert 6 * 7 < budget.drawn < 600
    rounds = {lease.start for lease in leases[0]}  # type: ignore[attr-defined]
    assert len(rounds) % 7 == 0


def test_worker_can_stop_the_run_for_all_workers() -> None:
    def main(transport: VirtualTransport) -> object:
        if transport.rank == 0:
            budget = Budget(transport, 100_000, lambda rank, report: None)
            budget.open(budget.total)
            transport.sleep(ENOUGH)
            return budget
        if transport.rank == 3:
            transport.sleep(3.0)
            SampleClient(transport).stop()
            return []
        return draw_all(transport, 2, lambda: 0.1)

    budget, *leases = VirtualCluster(4, Cluster()).run(main)
    assert isinstance(budget, Budget)
    end = covered(leases)  # type: ignore[arg-type]
    assert 0 < end == budget.drawn == budget.total < 100_000
    assert budget.used_up


def test_lease_request_before_segment_is_answered_at_its_start() -> None:
    def keep(transport: VirtualTransport, budget: Budget) -> None:
        transport.sleep(5.0)
        assert budget.drawn == 0
        budget.open(budget.total)

    _, _, leases = run(3, 50, keep)
    assert covered(leases) == 50


def test_worker_reports_arrive_with_lease_requests() -> None:
    _, reports, leases = run(2, 30, open_all, batch=4)
    assert sum(report.samples for _, report in reports) == 30
    for rank, own in enumerate(leases, start=1):
        mine = [report for source, report in reports if source == rank]
        assert mine[0] == WorkerReport()
        assert [report.samples for report in mine[1:]] == [lease.size for lease in own]
        assert [report.steps for report in mine[1:]] == list(range(len(own)))


def test_worker_report_arrives_unchanged() -> None:
    sent = WorkerReport(samples=2**40, loss=0.1, waiting=1.5e-9, sent=2**52, steps=7)

    def main(transport: VirtualTransport) -> object:
        if transport.rank == 0:
            got: Reports = []
            budget = Budget(transport, 10, lambda rank, report: got.append((rank, report)))
            transport.sleep(ENOUGH)
            return got, budget.drawn
        SampleClient(transport).report(sent)
        return None

    assert VirtualCluster(2, Cluster()).run(main)[0] == ([(1, sent)], 0)
