"""An operation may end by a failure before MPI reports which rank has failed."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest
from mpi4py import MPI

from aladdin_mpi.errors import PeerFailedError
from aladdin_mpi.transport.mpi import requests, world
from aladdin_mpi.transport.mpi.engine import MpiTransport
from aladdin_mpi.transport.mpi.requests import MpiRequest


@pytest.fixture
def failed_ranks(monkeypatch: pytest.MonkeyPatch) -> set[int]:
    """Ranks that MPI reports as failed."""
    known: set[int] = set()
    monkeypatch.setattr(world, "failed_ranks", lambda: set(known))
    return known


@pytest.fixture
def transport(failed_ranks: set[int]) -> Iterator[MpiTransport]:
    transport = MpiTransport(timeout=30, progress=False)
    transport._failures.survives = True
    yield transport
    # No rank has failed: the ranks leave as usual.
    transport._failures.survives, transport._failures.failed = False, frozenset()
    transport.close()


def broken_sum(transport: MpiTransport, error: int = MPI.ERR_PROC_FAILED) -> MpiRequest:
    request = MpiRequest("Iallreduce", None, receives=False)
    transport._requests.begin(request)  # without a handle, as MPI has ended the operation
    transport._requests.take_fresh()
    transport._requests._meet_failure(request, MPI.Exception(error))
    return request


@pytest.mark.parametrize("error", [MPI.ERR_PROC_FAILED, MPI.ERR_OTHER])
def test_operation_ended_by_failure_raises_once_failed_rank_is_known(
    transport: MpiTransport, failed_ranks: set[int], error: int
) -> None:
    """Open MPI reports ERR_OTHER if a rank fails between two rounds of a collective."""
    request = broken_sum(transport, error)
    assert not transport.test(request)
    assert not transport.test(request)
    failed_ranks.add(1)
    time.sleep(2 * world.LOOK_FOR_FAILURES)
    with pytest.raises(PeerFailedError) as caught:
        transport.test(request)
    assert caught.value.rank == 1


@pytest.mark.parametrize("in_time", [False, True])
def test_sum_started_before_its_rank_notices_a_failure_ends(
    transport: MpiTransport, failed_ranks: set[int], in_time: bool
) -> None:
    """The progress thread notices the failure before it takes the sum, or before MPI ends it."""
    request = MpiRequest("Iallreduce", None, receives=False)
    if in_time:
        transport._requests.begin(request)
    failed_ranks.add(1)
    time.sleep(2 * world.LOOK_FOR_FAILURES)
    transport._requests._look_for_failures()
    if not in_time:
        transport._requests._pending.add(request)
        transport._requests._meet_failure(request, MPI.Exception(MPI.ERR_REVOKED))
    with pytest.raises(PeerFailedError) as caught:
        transport.test(request)
    assert caught.value.rank == 1


@pytest.mark.parametrize("error", [MPI.ERR_PROC_FAILED, MPI.ERR_OTHER])
def test_operation_ended_by_unidentified_failure_raises_after_time_limit(
    transport: MpiTransport, monkeypatch: pytest.MonkeyPatch, error: int
) -> None:
    request = broken_sum(transport, error)
    assert not transport.test(request)
    monkeypatch.setattr(requests, "NAMED_WITHIN", 0.0)
    with pytest.raises(MPI.Exception):
        transport.test(request)
    transport._requests._pending.remove(request)
